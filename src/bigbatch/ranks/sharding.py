"""Models that are sharded with `fully_shard` (FSDP2): every pass through them is a meeting of all ranks.

Gradients are reduced and sharded in every backward, so what ranks weigh their losses with must be in one unit, and all
must make as many passes. Nothing is averaged on the way: weights say it all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigbatch.errors import ConfigurationError


def sharded(models: Sequence[nn.Module]) -> list[Any]:
    """Return the sharded parts of some models; by name, since importing FSDP takes as long as all of torch."""
    every = (module for model in models for module in model.modules())
    return [module for module in every if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)]


def group_of(models: Sequence[nn.Module]) -> dist.ProcessGroup:
    """Return the ranks that a model is sharded over."""
    meshes: set[Any] = {getattr(p, "device_mesh", None) for model in models for p in model.parameters()} - {None}
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
        shown = ", ".join(str(mesh) for mesh in meshes)
        msg = (
            f"this model is sharded over {shown or 'nothing'}, which does not tell which ranks have samples of their "
            "own.\n"
            "Say it:  group=mesh['data'].get_group()"
        )
        raise ConfigurationError(msg)
    found: dist.ProcessGroup = next(iter(meshes)).get_group()
    return found


def sum_only(models: Sequence[nn.Module]) -> None:
    """Have a reduction add up and not average; refuse parameters that no reduction reaches."""
    for model in models:
        loose = [name for name, p in model.named_parameters() if p.requires_grad and not hasattr(p, "to_local")]
        if loose:
            msg = (
                f"{len(loose)} parameters of this model are outside of fully_shard, {loose[0]} the first: nothing "
                "reduces their gradients.\n"
                "Shard the whole model as well, after its parts:  fully_shard(model)"
            )
            raise ConfigurationError(msg)
    for module in sharded(models):
        module.set_gradient_divide_factor(1.0)
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # other ways of adding up are NCCL's alone
            module.set_force_sum_reduction_for_comms(True)
        module.set_requires_gradient_sync(True)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in its own memory."""
    whole: Any = tensor
    return whole.to_local() if hasattr(tensor, "to_local") else tensor


def norm(parts: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the norm over all ranks' parts."""
    found = torch.nn.utils.get_total_norm(parts) if parts else torch.zeros((), device=device)
    total = found.square()
    dist.all_reduce(total, group=group)
    return total.sqrt()

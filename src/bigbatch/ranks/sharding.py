"""Models that are sharded with `fully_shard` (FSDP2): every pass through them is a meeting of all ranks.

Gradients are reduced and sharded in every backward, so what ranks weigh their losses with must be in one unit, and all
must make as many passes. Nothing is averaged on the way: weights say it all.
"""

import weakref
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


class Shards:
    """The parts of a model that are sharded, and the ranks over which they are."""

    def __init__(self, models: Sequence[nn.Module], parts: Sequence[Any], group: dist.ProcessGroup | None) -> None:
        """Find out who has samples of its own (`group`), and over whom each gradient is spread (`spread`)."""
        self.parts = parts
        every: list[Any] = [p for model in models for p in model.parameters() if hasattr(p, "device_mesh")]
        found: dict[Any, Any] = {parameter.device_mesh: parameter for parameter in every}
        if len(found) != 1:
            shown = " and ".join(str(mesh) for mesh in found) or "nothing"
            raise ConfigurationError(f"this model is sharded over {shown}: shard all of it over one mesh.")
        ((mesh, parameter),) = found.items()
        if mesh.ndim == 1:
            self.spread: dist.ProcessGroup = mesh.get_group()
            self.group = group or self.spread
        elif mesh.ndim == 2 and parameter.placements[0].is_replicate():  # noqa: PLR2004 - replicas of shards, HSDP
            self.spread = mesh.get_group(1)
            whole = dist.group.WORLD if mesh.size() == dist.get_world_size() else None
            self.group = group or whole or mesh._flatten().get_group()  # noqa: SLF001 - no public name
        else:
            msg = (
                f"this model is sharded over {mesh} in more than one way, as with tensor parallelism, which is not "
                "supported yet: its norm and its counts would have to know which way is which.\n"
                "Shard over one dimension, or two with replicas:  fully_shard(model, mesh=init_device_mesh(kind, (n,)))"
            )
            raise ConfigurationError(msg)

    def reduce(self, *, now: bool) -> None:
        """Have the next backward reduce gradients, or keep them whole and add up."""
        for part in self.parts:
            part.set_requires_gradient_sync(now)

    def forget(self) -> None:
        """Drop gradients that were kept whole and never reduced, as those of a window that is dropped."""
        for part in self.parts:
            state = part._get_fsdp_state()  # noqa: SLF001 - no public name
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001 - until 2.11
            for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None  # noqa: SLF001

    def norm(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the norm of a gradient from this rank's part of it."""
        found = torch.nn.utils.get_total_norm(parts) if parts else torch.zeros((), device=device)
        total = found.square()
        dist.all_reduce(total, group=self.spread)
        return total.sqrt()


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


_owners: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def average_after(owner: object, parts: Sequence[Any]) -> None:
    """Have reductions average again, as they do by default, when the last owner of these parts is gone."""
    for part in parts:
        _owners[part] = _owners.get(part, 0) + 1
        weakref.finalize(owner, _average, weakref.ref(part))


def _average(reference: "weakref.ref[Any]") -> None:
    part = reference()
    if part is None:
        return
    _owners[part] -= 1
    if not _owners[part]:
        del _owners[part]
        part.set_gradient_divide_factor(None)
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(False)
        part.set_requires_gradient_sync(True)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in its own memory."""
    whole: Any = tensor
    return whole.to_local() if hasattr(tensor, "to_local") else tensor

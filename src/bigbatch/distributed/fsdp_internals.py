"""What FSDP keeps of a sharded module: its groups of parameters, and the whole ones that stand in for shards."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bigbatch.errors import ConfigurationError


def sharded(models: Sequence[nn.Module]) -> list[Any]:
    """Return the sharded parts of some models; by name, since importing FSDP takes as long as all of torch."""
    every = (module for model in models for module in model.modules())
    return [module for module in every if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)]


def groups_of(part: Any) -> list[Any]:
    """Return FSDP's groups of parameters of a sharded module: those that travel together."""
    state = part._get_fsdp_state()  # noqa: SLF001 - no public name
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found if found is not None else filter(None, [state._fsdp_param_group]))  # noqa: SLF001 - until 2.11


def parameters_of(parts: Iterable[Any]) -> Iterator[Any]:
    """Return what FSDP keeps of each parameter of some sharded modules."""
    return (each for part in parts for group in groups_of(part) for each in group.fsdp_params)


def tensors_of(each: Any) -> list[Tensor]:
    """Return a parameter's shard, and the whole one that stands in for it from a forward to its backward, if any."""
    # By a private name: its property wants it to be filled.
    return [each.sharded_param, *([each._unsharded_param] if hasattr(each, "_unsharded_param") else [])]  # noqa: SLF001


def whole_weights(parts: Iterable[Any]) -> Iterator[Tensor]:
    """Return all whole parameters that stand in for shards, those that FSDP has freed since a forward, too."""
    for each in parameters_of(parts):
        yield from tensors_of(each)[1:]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in its own memory."""
    if type(tensor) is Tensor:  # what it has not takes a plain tensor long to say
        return tensor
    whole: Any = tensor
    return whole.to_local() if hasattr(tensor, "to_local") else tensor


def held(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor itself, not a view of it: its version tells of whatever is added to it."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group, as the world numbers them."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def flat(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return all ranks of a mesh as one group."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and mesh.size() == dist.get_world_size():
        return world
    if not mesh.mesh_dim_names:
        msg = (
            f"the mesh of fully_shard, {mesh}, has several dimensions and no names for them, which torch needs to make "
            "one group of it.\n"
            'Name them:  init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards"))'
        )
        raise ConfigurationError(msg)
    found: dist.ProcessGroup = mesh._flatten().get_group()  # noqa: SLF001 - no public name
    return found

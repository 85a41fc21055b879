"""Which ranks have samples of their own, and which hold parts of one model and share them.

A device mesh may have a dimension for data and one for parts of the model (tensor parallelism). Counts are added up
over the first alone: the ranks of the second see the same samples, and come to the same counts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bigbatch.errors import ConfigurationError
from bigbatch.ranks.alone import warn_of_others

_BOTH = (
    "group= and mesh= say the same thing, who has samples of its own, and both were given.\n"
    'Give one of them:  mesh=mesh["dp"]'
)
_NO_GROUP = (
    "this process is not in the group of group=: new_group(...) has returned no group here.\n"
    "Give each process the group that it belongs to; one that trains alone needs none:  group=None"
)
_OUTSIDE = (
    "this process is not in the mesh of mesh=.\n"
    "Give each process the part of the mesh that it belongs to, as slicing does it:  mesh=mesh['dp']"
)
_UNNAMED = (
    "mesh={} has several dimensions and no names for them, which torch needs to make one group of it.\n"
    'Name them:  init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards"))'
)
_SEVERAL_WAYS = (
    "the parameters of this model are spread over more than one group of ranks beside those with samples of their own: "
    "{}. Its norm could be told, but not who has the same samples as whom.\n"
    'Spread the model over one dimension beside data, such as mesh["tp"].'
)
_ASTRIDE = (
    "{name} is spread over ranks {spread}, of which {some} have samples of their own and others have not, as "
    "{given} says.\n"
    'Give the dimensions that fully_shard was given, or those beside tensor parallelism:  mesh=mesh["dp"]'
)
_NOT_SAMPLES = (
    "{name} is spread over ranks {spread}, and they are among those that have samples of their own ({own}), as {given} "
    "says. Ranks that hold parts of one parameter see the same samples, unless fully_shard has spread it.\n"
    "Give the dimensions of data alone:  mesh={typed}"
)
_WHO = (
    "{name} is spread over ranks {spread} (tensor parallelism), which see the same samples, and {others} other ranks "
    "are there, of which nothing says whether they have samples for the same update.\n"
    'Say which ranks have samples of their own:  mesh={typed}, or mesh["dp"] of size 1 where this model is trained by '
    "these ranks alone"
)


def given_group(group: object, mesh: object) -> dist.ProcessGroup | None:
    """Return the ranks that `group=` or `mesh=` speaks of."""
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and group == outside:
        raise ConfigurationError(_NO_GROUP)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        msg = f"group must be a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD; found {group!r}"
        raise ConfigurationError(msg)
    if mesh is None:
        return group
    if group is not None:
        raise ConfigurationError(_BOTH)
    if not isinstance(mesh, DeviceMesh):
        msg = f'mesh must be a torch.distributed.device_mesh.DeviceMesh, such as mesh["dp"]; found {mesh!r}'
        raise ConfigurationError(msg)
    if mesh.get_coordinate() is None:
        raise ConfigurationError(_OUTSIDE)
    return flat(mesh)


def flat(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return all ranks of a mesh as one group."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and mesh.size() == dist.get_world_size():
        return world
    if not mesh.mesh_dim_names:
        raise ConfigurationError(_UNNAMED.format(mesh))
    found: dist.ProcessGroup = mesh._flatten().get_group()  # noqa: SLF001 - no public name
    return found


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group, as the world numbers them."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def spread_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that are DTensors, with their names; by what they have, since importing them takes long."""
    for model in models:
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                yield name, parameter


def groups_by_dimension(parameter: Any) -> list[dist.ProcessGroup]:
    """Return over whom a parameter is spread or repeated, for each dimension of its mesh."""
    mesh: DeviceMesh = parameter.device_mesh
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def peers(
    models: Sequence[nn.Module], own: dist.ProcessGroup, mesh: DeviceMesh | None, *, sharded: bool
) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other parts of this one's model and see the same samples; None where none do.

    `own` are those that have samples of their own; `sharded` tells that `fully_shard` may spread parameters over them.
    """
    with_samples, me = set(members(own)), dist.get_rank()
    given = "group=" if mesh is None else "mesh="
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, parameter in spread_parameters(models):
        for group in groups_by_dimension(parameter):
            ranks = members(group)
            both = with_samples & set(ranks)
            if len(ranks) == 1 or (sharded and both == set(ranks)):
                continue
            told = {"name": name, "spread": list(ranks), "given": given}
            if both == set(ranks):
                typed = _typed(mesh, parameter.device_mesh)
                raise ConfigurationError(_NOT_SAMPLES.format(own=sorted(with_samples), typed=typed, **told))
            if both != {me}:
                raise ConfigurationError(_ASTRIDE.format(some=sorted(both), **told))
            found[ranks] = group
    if len(found) > 1:
        raise ConfigurationError(_SEVERAL_WAYS.format(" and ".join(str(list(ranks)) for ranks in found)))
    return next(iter(found.values()), None)


def this_one_alone(models: Sequence[nn.Module]) -> dist.ProcessGroup | None:
    """Return the group of this process, where all ranks hold parts of one model; raise where some may not.

    None where no parameter is spread at all: others may be there, and train by themselves.
    """
    every = list(spread_parameters(models))
    if not every or dist.get_world_size() == 1:
        warn_of_others()
        return None
    for name, parameter in every:
        mesh: DeviceMesh = parameter.device_mesh
        if mesh.ndim > 1 or mesh.size() != dist.get_world_size():
            spread = sorted(mesh.mesh.flatten().tolist())
            others = dist.get_world_size() - len(spread)
            raise ConfigurationError(_WHO.format(name=name, spread=spread, others=others, typed=_typed(None, mesh)))
    found: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return found


def _typed(given: DeviceMesh | None, spread: DeviceMesh) -> str:
    """Return what to type for the dimensions beside those of tensor parallelism, as far as names tell."""
    above = getattr(spread, "_get_root_mesh", None)  # no public name, and none at all in older versions
    root: DeviceMesh = given or (spread if above is None else above())
    taken = spread.mesh_dim_names or ()
    names = [name for name in root.mesh_dim_names or () if name not in taken] or ["dp"]
    return "mesh[" + ", ".join(f'"{name}"' for name in names) + "]"

"""Models that are sharded with `fully_shard` (FSDP2): every pass through them is a meeting of all ranks.

Gradients are reduced and sharded in every backward, so what ranks weigh their losses with must be in one unit, and all
must make as many passes. Nothing is averaged on the way: weights say it all. Which ranks they are, and so who has
samples of its own, is known from the mesh that `fully_shard` got; other dimensions are those of tensor parallelism.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bigbatch.errors import ConfigurationError
from bigbatch.ranks.groups import groups_of, sharded
from bigbatch.ranks.meshes import flat, members
from bigbatch.ranks.replicas import replicas_of, within_a_replica


class Shards:
    """The parts of a model that are sharded, and the ranks that have samples of their own (`group`)."""

    def __init__(self, parts: Sequence[Any], given: dist.ProcessGroup | None, *, by_mesh: bool) -> None:
        """Find out who they are; what was given must say the same (`by_mesh`: by `mesh=`, not by `group=`)."""
        self.parts = parts
        self._groups = [group for part in parts for group in groups_of(part)]
        found: dict[Any, DeviceMesh] = {}
        for group in self._groups:
            mesh: DeviceMesh = group.mesh_info.mesh
            found[tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())] = mesh
        if len(found) != 1:
            shown = " and ".join(str(mesh) for mesh in found.values()) or "nothing"
            msg = (
                f"this model is sharded over {shown}: shard all of it over one mesh.\n"
                "Give the same one to every call:  fully_shard(part, mesh=mesh)"
            )
            raise ConfigurationError(msg)
        (mesh,) = found.values()
        self.group = flat(mesh)
        self.replicas = replicas_of(self._groups)
        self.device: Any = self._groups[0].device  # where they compute; shards may be elsewhere
        if given is not None and members(given) != members(self.group):
            names = ", ".join(f'"{name}"' for name in mesh.mesh_dim_names or ("dp",))
            msg = (
                f"fully_shard adds up this model's gradients over ranks {list(members(self.group))}, so those are the "
                f"ones that have samples of their own, and {'mesh=' if by_mesh else 'group='} says "
                f"{list(members(given))}.\n"
                f"Leave it out, or give what fully_shard was given, without tensor parallelism:  mesh=mesh[{names}]"
            )
            raise ConfigurationError(msg)

    def reduce(self, *, now: bool) -> None:
        """Have the next backward reduce gradients, or keep them whole and add up."""
        for part in self.parts:
            part.set_requires_gradient_sync(now)

    def within_a_replica(self) -> AbstractContextManager[None]:
        """Inside, a backward leaves the sums of replicas apart."""
        return within_a_replica(self._groups)

    def forget(self) -> None:
        """Drop gradients that were kept whole and never reduced, as those of a window that is dropped."""
        for parameter in (each for group in self._groups for each in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None  # noqa: SLF001


def sum_only(models: Sequence[nn.Module]) -> None:
    """Have a reduction add up and not average; refuse parameters that no reduction reaches."""
    reached = {id(p) for part in sharded(models) for group in groups_of(part) for p in _parameters(group)}
    for model in models:
        loose = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached]
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


def _parameters(group: Any) -> list[Any]:
    """Return them as their modules have them now, which may have been made anew since."""
    places = [each._module_info for each in group.fsdp_params]  # noqa: SLF001
    return [getattr(place.module, place.param_name) for place in places]


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

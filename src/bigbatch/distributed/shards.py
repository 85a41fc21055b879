"""Models that are sharded with `fully_shard` (FSDP2): every pass through them is a meeting of all ranks.

Gradients are reduced and sharded in every backward, so what ranks weigh their losses with must be in one unit, and all
must make as many passes. Nothing is averaged on the way: weights say it all. Which ranks they are, and so who has
samples of its own, is known from the mesh that `fully_shard` got.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bigbatch.distributed.fsdp_internals import flat, groups_of, parameters_of, sharded, tensors_of
from bigbatch.distributed.hybrid import replicas_of, within_a_replica
from bigbatch.distributed.wrappers import members
from bigbatch.errors import ConfigurationError

HOOKED = (
    "this sharded model has an all-reduce hook, set_all_reduce_hook(...), which changes what ranks have added up: over "
    "other ranks, whose samples nobody has counted, or otherwise.\n"
    "Take it out. For replicas of shards, give fully_shard a mesh of two dimensions:  "
    'fully_shard(model, mesh=mesh["replicas", "shards"])'
)


class Shards:
    """The parts of a model that are sharded, and the ranks that have samples of their own (`group`)."""

    def __init__(self, parts: Sequence[Any], given: dist.ProcessGroup | None) -> None:
        """Find out who they are; `given` by `group=` must say the same."""
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
        self.within: dist.ProcessGroup = self._groups[0].mesh_info.shard_process_group  # the ranks of one replica
        if self.hooked:
            raise ConfigurationError(HOOKED)
        self.device = torch.device(self._groups[0].device)  # where they compute; shards may be elsewhere
        if given is not None and members(given) != members(self.group):
            msg = (
                f"fully_shard adds up this model's gradients over ranks {list(members(self.group))}, so those are the "
                f"ones that have samples of their own, and group= says {list(members(given))}.\n"
                "Leave group= out."
            )
            raise ConfigurationError(msg)

    @property
    def hooked(self) -> int:
        """How many groups call a function of the user's own for what they have reduced."""
        return sum(getattr(group, "_all_reduce_hook", None) is not None for group in self._groups)

    @contextmanager
    def around_backward(self, own: Iterable[Tensor], *, reduce: bool, apart: bool) -> Iterator[None]:
        """Inside, a backward reduces the gradients of `own`, or keeps them whole and adds up (`reduce`).

        `apart` leaves the sums of replicas apart. Other accumulators may want their groups otherwise, so this is said
        anew for every backward.
        """
        mine = _ids(own)
        for group in self._groups:
            if any(id(each.sharded_param) in mine for each in group.fsdp_params):
                group.reduce_grads = group.all_reduce_grads = reduce
        with within_a_replica(self._groups) if apart else nullcontext():
            yield
        if reduce:
            self._reduce_left()

    def _reduce_left(self) -> None:
        """Reduce what was kept whole and not reached by the last backward: that of a model which it did not run."""
        for part in self.parts:
            if any(map(_waits, parameters_of([part]))):
                # What FSDP calls at the end of a backward, for all modules of a model at once.
                part._get_fsdp_state()._root_post_backward_final_callback()  # noqa: SLF001 - no public name

    def forget(self, own: Iterable[Tensor]) -> None:
        """Drop gradients that were kept whole and never reduced, as those of a window that is dropped."""
        mine = _ids(own)
        for each in parameters_of(self.parts):
            if id(each.sharded_param) in mine:
                _set_waiting(each, None)
                for whole in tensors_of(each)[1:]:
                    whole.grad = None


def _ids(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _waits(each: Any) -> bool:
    """Whether a gradient of this parameter is kept whole."""
    return each.unsharded_accumulated_grad is not None or any(p.grad is not None for p in tensors_of(each)[1:])


def _set_waiting(each: Any, gradient: Tensor | None) -> None:
    """Set what a parameter has added up whole; from torch 2.15 on, that is the `.grad` of the whole one itself."""
    if not isinstance(getattr(type(each), "unsharded_accumulated_grad", None), property):
        each.unsharded_accumulated_grad = gradient


@contextmanager
def leaving_alone(parts: Iterable[Any], own: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a backward reduces no group of parameters that has none of `own`, nor adds to what others have waiting.

    Their `.grad` is left to whoever calls this, that of whole ones, too.
    """
    mine = _ids(own)
    groups, waiting = [], []
    for group in (group for part in parts for group in groups_of(part)):
        others = [each for each in group.fsdp_params if id(each.sharded_param) not in mine]
        waiting += [(each, each.unsharded_accumulated_grad) for each in others]
        if len(others) == len(group.fsdp_params):
            groups.append((group, group.reduce_grads))
            group.reduce_grads = False
    for each, _ in waiting:
        _set_waiting(each, None)
    try:
        yield
    finally:
        for group, reduces in reversed(groups):  # modules that share a group name it twice
            group.reduce_grads = reduces
        for each, gradient in reversed(waiting):
            _set_waiting(each, gradient)


def refuse_loose(models: Sequence[nn.Module]) -> None:
    """Refuse parameters that no reduction reaches."""
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


def sum_only(parts: Sequence[Any]) -> None:
    """Have a reduction add up and not average."""
    for module in parts:
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

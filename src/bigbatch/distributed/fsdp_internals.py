"""All that depends on private parts of FSDP2: its groups of parameters, what they reduce, and with whom."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


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
    return (whole for each in parameters_of(parts) for whole in tensors_of(each)[1:])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor itself, not a view of it: its version tells of whatever is added to it."""
    # What it has not takes a plain tensor long to say.
    return tensor if type(tensor) is Tensor else getattr(tensor, "_local_tensor", tensor)


def flat(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return all ranks of a mesh as one group."""
    world = dist.group.WORLD
    if world is not None and mesh.size() == dist.get_world_size():
        return world
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()  # noqa: SLF001 - no public name


def set_average(part: Any, *, averages: bool) -> None:
    """Have a backward average over ranks, as FSDP does by itself, or add up."""
    part.set_gradient_divide_factor(None if averages else 1.0)
    if hasattr(part, "set_force_sum_reduction_for_comms"):  # other ways of adding up are NCCL's alone
        part.set_force_sum_reduction_for_comms(not averages)
    part.set_requires_gradient_sync(True)


# What a backward reduces.


def reduce_in_backward(groups: Iterable[Any], own: set[int], *, reduces: bool) -> None:
    """Have the next backward reduce the groups that have any parameter of `own`, or keep their gradients whole."""
    for group in groups:  # another accumulator may want it otherwise, so each backward sets it anew
        if any(id(each.sharded_param) in own for each in group.fsdp_params):
            group.reduce_grads = group.all_reduce_grads = reduces


def reduce_left(parts: Iterable[Any]) -> None:
    """Reduce what was kept whole and not reached by the last backward: that of a model which it did not run."""
    for part in parts:
        kept = [each.unsharded_accumulated_grad for each in parameters_of([part])]
        if any(each is not None for each in (*kept, *(whole.grad for whole in whole_weights([part])))):
            # What FSDP calls at the end of a backward, for all modules of a model at once.
            part._get_fsdp_state()._root_post_backward_final_callback()  # noqa: SLF001 - no public name


def drop_waiting(parts: Iterable[Any], own: set[int]) -> None:
    """Drop the gradients of `own` that were kept whole and not reduced."""
    for each in parameters_of(parts):
        if id(each.sharded_param) in own:
            _set_waiting(each, None)
            for whole in tensors_of(each)[1:]:
                whole.grad = None


@contextmanager
def leaving_alone(parts: Iterable[Any], own: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a backward adds nothing to gradients that wait to be reduced and are of none of `own`.

    Their `.grad` is left to whoever calls this, that of whole ones, too.
    """
    mine = set(map(id, own))
    others = [each for each in parameters_of(parts) if id(each.sharded_param) not in mine]
    waiting = [(each, each.unsharded_accumulated_grad) for each in others]  # shared groups name it twice
    for each in others:
        _set_waiting(each, None)
    try:
        yield
    finally:
        for each, gradient in waiting:
            _set_waiting(each, gradient)


def _set_waiting(each: Any, gradient: Tensor | None) -> None:
    """Set what a parameter has added up whole; from torch 2.15 on, that is the `.grad` of the whole one itself."""
    if not isinstance(getattr(type(each), "unsharded_accumulated_grad", None), property):
        each.unsharded_accumulated_grad = gradient


# Replicas of shards (HSDP). FSDP's own way, `set_requires_all_reduce(False)`, keeps a group's sums in one flat piece:
# where micro-batches reach different parameters it adds up unlike things, and never reduces what the last one leaves
# out. So in our backwards a group knows of no replicas; they are added up when the window closes.


def replicas_of(groups: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shards as this one; None where there are none, or they cannot be apart."""
    found: dist.ProcessGroup | None = getattr(groups[0].mesh_info, "replicate_process_group", None)
    with within_a_replica(groups), suppress(AssertionError):  # as FSDP says that there are none
        if any(group._all_reduce_process_group is not None for group in groups):  # noqa: SLF001
            return None  # another version of torch may know of them elsewhere
    return found


@contextmanager
def within_a_replica(groups: Sequence[Any]) -> Iterator[None]:
    """Inside, a backward reduces among the ranks of a replica, and leaves the sums of replicas apart."""
    before = [(group, group.mesh_info, group.post_forward_mesh_info) for group in groups]
    for group, whole, after_forward in before:
        kind = next((kind for kind in type(whole).__mro__ if kind.__name__ == "FSDPMeshInfo"), type(whole))
        group.mesh_info = object.__new__(kind)  # all that FSDP knows of the group's ranks, but for replicas
        vars(group.mesh_info).update(vars(whole))
        if after_forward == whole:  # by which FSDP knows that weights are freed entirely after a forward
            group.post_forward_mesh_info = group.mesh_info
    try:
        yield
    finally:
        for group, whole, after_forward in before:
            if group.post_forward_mesh_info is group.mesh_info:  # or the first forward has changed its mind about it
                group.post_forward_mesh_info = after_forward
            group.mesh_info = whole

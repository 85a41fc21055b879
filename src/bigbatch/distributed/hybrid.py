"""Replicas of shards (HSDP, a mesh of two dimensions): kept apart in every backward, added up once per update.

Each replica scatters a micro-batch's gradients among its own ranks and adds up in `.grad`; replicas are added up when
the window closes, whenever that is. FSDP has a way of its own, `set_requires_all_reduce(False)`, which keeps a group's
sums in one flat piece until a last backward: where micro-batches do not reach the same parameters it adds up unlike
things, and what the last one does not reach is never reduced. So in our backwards a group knows of no replicas at all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def replicas_of(groups: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shards as this one; None where there are none, or they cannot be apart."""
    found: dist.ProcessGroup | None = getattr(groups[0].mesh_info, "replicate_process_group", None)
    if found is None or dist.get_world_size(found) == 1:
        return None
    with within_a_replica(groups):
        return None if any(map(_adds_up_replicas, groups)) else found


@contextmanager
def within_a_replica(groups: Sequence[Any]) -> Iterator[None]:
    """Inside, a backward reduces among the ranks of a replica, and leaves the sums of replicas apart."""
    were = []
    for group in groups:
        whole, after_forward = group.mesh_info, group.post_forward_mesh_info
        alone = _without_replicas(whole)
        group.mesh_info = alone
        if after_forward == whole:  # by which FSDP knows that weights are freed entirely after a forward
            group.post_forward_mesh_info = alone
        were.append((group, whole, alone, after_forward))
    try:
        yield
    finally:
        for group, whole, alone, after_forward in reversed(were):  # modules that share a group name it twice
            group.mesh_info = whole
            if group.post_forward_mesh_info is alone:  # or the first forward has changed its mind about it
                group.post_forward_mesh_info = after_forward


def _without_replicas(whole: Any) -> Any:
    """Return what FSDP knows of a group's ranks, but for replicas; all of it where there are no shards."""
    kind = next((kind for kind in type(whole).__mro__ if kind.__name__ == "FSDPMeshInfo"), type(whole))
    found: Any = object.__new__(kind)
    vars(found).update(vars(whole))
    return found


def _adds_up_replicas(group: Any) -> bool:
    """Whether a backward would: another version of torch may have it elsewhere."""
    try:
        return group._all_reduce_process_group is not None  # noqa: SLF001 - no public name
    except AssertionError:  # as FSDP says that there are none
        return False

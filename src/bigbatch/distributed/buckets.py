"""Gradients on their way: added up over ranks bucket by bucket, some of them sent while the next is filled."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 32 << 20  # bytes that are sent at once: enough to fill a wire, and small beside a model
_IN_FLIGHT = 2  # buckets under way while the next one is filled


def add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup, wire: Callable[[torch.device], torch.device]) -> None:
    """Add up tensors over a group, in place; `wire` says where to send from what is on a device."""
    under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    for bucket in _buckets(gradients):
        if len(under_way) == _IN_FLIGHT:
            _arrived(*under_way.pop(0))
        flat = _flat(bucket)
        flat = flat.to(wire(flat.device))
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None  # noqa: S101 - it is async
        under_way.append((work, flat, bucket))
    for each in under_way:
        _arrived(*each)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for group in groups.values():
        bucket: list[Tensor] = []
        size = 0
        for gradient in group:
            bytes_ = gradient.numel() * gradient.element_size()
            if bucket and size + bytes_ > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += bytes_
        if bucket:
            yield bucket


def _flat(bucket: list[Tensor]) -> Tensor:
    """Return a bucket as one row: a copy, but for a lone tensor, which may be large, and is sent from where it is."""
    return bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])


def _arrived(work: dist.Work, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    if flat.data_ptr() == bucket[0].data_ptr():
        return
    pieces = flat.split([gradient.numel() for gradient in bucket])
    torch._foreach_copy_(bucket, [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)])

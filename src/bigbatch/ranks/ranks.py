"""The processes that make one big batch together, and the two things they send each other.

Every rank adds up its own micro-batches and says nothing meanwhile. When its window closes it makes a statement: a few
numbers, added up over all ranks (`agreeing.py`). Then everyone knows what the big batch counted, each rank weighs its
sum by that, and the gradients cross the wire once.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import ConfigurationError, RankFailed, WindowError
from bigbatch.ranks import sharding
from bigbatch.ranks.sharding import Shards
from bigbatch.ranks.wrappers import (
    data_parallel,
    group_of,
    has_reduced,
    keep_quiet,
    let_speak,
    refuse_hidden_wrappers,
    refuse_hooks,
    refuse_overlap,
    silence,
)
from bigbatch.reading.counts import LOW_PRECISION, Count

_BUCKET = 32 << 20  # bytes that are sent at once: enough to fill a wire, and small beside a model
_NUMBERS = 40  # in every message: a rank that fails need not know which one the others wait for
_IN_FLIGHT = 2  # buckets under way while the next one is filled
_MESSAGES = ("statement", "totals", "passes", "meeting")
_SAME = 1e-12
_made = count(1)
Message = Literal["statement", "totals", "passes", "meeting"]


class Ranks:
    """One group of processes, as one of them sees it."""

    def __init__(self, group: dist.ProcessGroup, wrappers: Sequence[DistributedDataParallel]) -> None:
        """Belong to a group; `wrappers` are what this process has its models in."""
        self.group, self._wrappers = group, list(wrappers)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.shards: Shards | None = None  # where every pass through the model is a meeting, and reduces by itself
        self.overlap = False  # whether DDP reduces in a window's last backward
        self.reduced = False  # whether it has
        self.spoken = False  # whether this rank has made its statement for the window at hand
        self.elsewhere = False  # whether others wait for it inside a model or a loss, where no statement is heard
        self.windows = 0  # made together until now
        self._number = next(_made)  # of all that this process has part in: the same on every rank

    @classmethod
    def of(
        cls, models: Sequence[nn.Module], group: dist.ProcessGroup | None, *, overlap: bool = False
    ) -> "Ranks | None":
        """Find out which processes share the gradients of some models; None where there is only this one.

        `overlap` has DDP reduce in the last backward of a window.
        """
        wrappers = data_parallel(models)
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                msg = (
                    "group= needs torch.distributed: call torch.distributed.init_process_group() first, under torchrun"
                )
                raise ConfigurationError(msg)
            return None
        shards = sharding.sharded(models)
        if shards:
            sharding.sum_only(models)
            spread = Shards(models, shards, group)
            found = cls(spread.group, ())
            found.shards, found.overlap = spread, overlap
            return found
        if not wrappers and dist.get_world_size() > 1:
            refuse_hidden_wrappers(models)
        chosen = group if group is not None or not wrappers else group_of(wrappers)
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if chosen is not None and chosen == outside:
            msg = (
                "this process is not in the group of group=: new_group(...) has returned no group here.\n"
                "Give each process the group that it belongs to; one that trains alone needs none:  group=None"
            )
            raise ConfigurationError(msg)
        if overlap:
            narrow = any(p.dtype in LOW_PRECISION for model in models for p in model.parameters() if p.requires_grad)
            refuse_overlap(wrappers, narrow)
        else:
            refuse_hooks(wrappers)
        if chosen is None or dist.get_world_size(chosen) == 1:
            return None
        made = cls(chosen, wrappers)
        made.overlap = bool(overlap)
        return made

    @property
    def sharded(self) -> bool:
        """Whether every pass through the model is a meeting of all ranks."""
        return self.shards is not None

    def keep_quiet(self, owner: object) -> None:
        """Have wrappers reduce nothing by themselves, as long as `owner` lives."""
        keep_quiet(owner, self._wrappers)
        if self.shards is not None:
            sharding.average_after(owner, self.shards.parts)

    def prepare(self, *, last: bool) -> None:
        """Before a forward: have DDP reduce in its backward if it is the window's last, and only where it should."""
        self.reduced = self.overlap and last
        for wrapper in self._wrappers:
            (let_speak if self.reduced else silence)(wrapper)
        if self.shards is not None and self.overlap:
            self.shards.reduce(now=last)

    @property
    def left_by_ddp(self) -> int:
        """How many wrappers were to reduce in the last backward, and have not."""
        return sum(not has_reduced(wrapper) for wrapper in self._wrappers) if self.reduced else 0

    def added(self, numbers: Sequence[Count], device: torch.device, about: Message) -> list[float]:
        """Add up some numbers over all ranks; this waits for the slowest. Raises where one of them has failed."""
        place = float(self._number * len(_MESSAGES) + _MESSAGES.index(about))
        found = self._sum([0.0, place, place * place, *numbers], device)
        self._refuse_failure(found)
        if not alike(self.size, found[1], found[2]):
            self.spoken = True  # all have heard that something is wrong
            raise WindowError(_ELSEWHERE)
        return found[3 : len(numbers) + 3]

    def _refuse_failure(self, found: list[float]) -> None:
        if found[0]:
            self.spoken = True
            msg = (
                f"{found[0]:g} of {self.size} ranks failed in this window, so it cannot be made; nothing was changed "
                "on this one. The error is in that rank's own output."
            )
            raise RankFailed(msg)

    def fail(self, device: torch.device) -> None:
        """Tell the others, who wait for this rank's numbers, that there will be none."""
        self.spoken = True
        self._sum([1.0], device)

    def _sum(
        self, numbers: Sequence[Count], device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> list[float]:
        precise = torch.float32 if device.type == "mps" else torch.float64
        row = torch.zeros(_NUMBERS, dtype=precise, device=device)
        for place, number in enumerate(numbers):
            row[place] = number
        dist.all_reduce(row, op=op, group=self.group)
        found: list[float] = row.tolist()
        return found

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest of all ranks' numbers."""
        # One that fails adds up instead: what it says of itself is heard in either way.
        found = self._sum([0.0, float(number)], device, dist.ReduceOp.MAX)
        self._refuse_failure(found)
        return round(found[1])

    def norm(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the norm of a gradient that is spread over all ranks."""
        assert self.shards is not None  # noqa: S101 - or it would be on every rank
        return self.shards.norm(parts, device)

    def anywhere(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return of each flag whether any rank has it up."""
        found = torch.tensor(flags, dtype=torch.uint8, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found.tolist()]

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """Add up tensors over all ranks, in place, bucket by bucket."""
        under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for bucket in _buckets(gradients):
            if len(under_way) == _IN_FLIGHT:
                _arrived(*under_way.pop(0))
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            assert work is not None  # noqa: S101 - it is async
            under_way.append((work, flat, bucket))
        for each in under_way:
            _arrived(*each)

    def share_buffers(self) -> None:
        """Send the first rank's buffers to all, as DDP does where it was told to."""
        for wrapper in self._wrappers:
            wanted = getattr(wrapper, "forward_sync_buffers", None)  # broadcast_buffers before torch 2.13
            if (wrapper.broadcast_buffers if wanted is None else wanted) and wrapper.modules_buffers:
                wrapper._sync_buffers()  # noqa: SLF001 - as its own forward does


_ELSEWHERE = (
    "the ranks are at different places: one closes a window that another has not come to, or has no part in.\n"
    "Have every rank close the same windows in the same order. Where one accumulator's `over` is inside another's, "
    "every rank needs as many batches; where samples are coupled, every rank needs samples in each update."
)


def alike(ranks: int, total: float, squares: float) -> bool:
    """Whether a number is the same on all ranks, by its sum over them and that of its squares."""
    return abs(ranks * squares - total * total) <= _SAME * ranks * squares


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


def _arrived(work: dist.Work, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    pieces = flat.split([gradient.numel() for gradient in bucket])
    torch._foreach_copy_(bucket, [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)])

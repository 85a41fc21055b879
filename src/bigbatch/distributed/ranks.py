"""The processes that make one big batch together, and the two things they send each other.

Every rank adds up its own micro-batches and says nothing meanwhile. When its window closes it makes a statement: a few
numbers, added up over all ranks (`agreeing.py`). Then everyone knows what the big batch counted, each rank weighs its
sum by that, and the gradients cross the wire once.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed import shards
from bigbatch.distributed.buckets import add_up
from bigbatch.distributed.discovery import warn_of_others
from bigbatch.distributed.fsdp_internals import local, sharded, whole_weights
from bigbatch.distributed.launcher import naming_lost_ranks
from bigbatch.distributed.shards import Shards
from bigbatch.distributed.wrappers import (
    data_parallel,
    given_group,
    group_of,
    has_reduced,
    hooked,
    keep_quiet,
    left_out,
    let_speak,
    members,
    refuse_cast,
    refuse_hidden_wrappers,
    refuse_hooks,
    refuse_no_sync,
    refuse_other_group,
    refuse_overlap,
    silence,
)
from bigbatch.errors import BigBatchError, ConfigurationError, RankFailed, WindowDisturbed, WindowError
from bigbatch.loss.count import LOW_PRECISION, Count

_NUMBERS = 40  # in every message: a rank that fails need not know which one the others wait for
_MESSAGES = ("statement", "totals", "passes", "meeting", "beginning", "about")
_LOOPS = 16  # that are told apart
_SAME = 1e-12
_made: Counter[tuple[int, ...]] = Counter()  # by each group of processes that this one is in
Message = Literal["statement", "totals", "passes", "meeting", "beginning", "about"]


class _Header(NamedTuple):
    """What every message begins with."""

    failed: float = 0.0  # whether this rank has
    again: float = 0.0  # whether it runs the window once more, in another way
    place: float = 0.0  # what it is about
    square: float = 0.0


class OthersTryAgain(BigBatchError):
    """Raised where another rank runs the window once more, and so will `BigStep` on all of them."""


class Ranks:
    """One group of processes, as one of them sees it: those that have samples of their own."""

    def __init__(self, group: dist.ProcessGroup, wrappers: Sequence[DistributedDataParallel]) -> None:
        """Belong to a group; `wrappers` are what this process has its models in."""
        self.group, self._wrappers = group, list(wrappers)
        self._models: Sequence[nn.Module] = ()  # whose weights nobody has sent to all
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.shards: Shards | None = None  # where every pass through the model is a meeting, and reduces by itself
        self.overlap = False  # whether DDP reduces in a window's last backward
        self.reduced = False  # whether it has
        self.spoken = False  # whether this rank has made its statement for the window at hand
        self.elsewhere = False  # whether others wait for it inside a model or a loss, where no statement is heard
        self.about: float | None = None  # what a window counts, as all have guessed together, where they need one unit
        self.dropped = 0  # backwards that this rank has dropped since the latest, though all have shards of them
        self.windows = 0  # made together until now
        self.loops = 0  # begun over batches: a window of one epoch is not made with that of another
        self._number = 0  # of all that these processes make together: the same on every rank

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
            warn_of_others()
            return None
        chosen = given_group(group)
        parts = sharded(models)
        if parts:
            shards.refuse_loose(models)
            found_shards = Shards(parts, chosen)
            found = cls(found_shards.group, ())
            found.shards, found.overlap = found_shards, overlap
            return found
        if dist.get_world_size() > 1 and not wrappers:
            refuse_hidden_wrappers(models)
        if chosen is not None and wrappers:
            refuse_other_group(wrappers, chosen)
        elif wrappers:
            chosen = group_of(wrappers)
        elif chosen is None:
            warn_of_others()
        refuse_cast(wrappers)
        refuse_no_sync(wrappers)
        if overlap:
            narrow = any(p.dtype in LOW_PRECISION for model in models for p in model.parameters() if p.requires_grad)
            refuse_overlap(wrappers, narrow)
        else:
            refuse_hooks(wrappers)
        if chosen is None or dist.get_world_size(chosen) == 1:
            return None
        made = cls(chosen, wrappers)
        made.overlap = bool(overlap)
        made._models = () if wrappers else models
        return made

    @property
    def sharded(self) -> bool:
        """Whether every pass through the model is a meeting of all ranks."""
        return self.shards is not None

    def frozen(self) -> list[Tensor]:
        """Return the weights that nobody trains, and that all should have in common; but for packed ones (8 bits)."""
        every = (p for model in self._models for p in model.parameters() if not p.requires_grad)
        return [p for p in every if type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1]

    @property
    def adds_up(self) -> bool:
        """Whether gradients are to be added up when a window closes: over all ranks, or over replicas of shards."""
        if self.shards is None:
            return not self.reduced
        return self.shards.replicas is not None and not self.overlap

    def around_backward(self, own: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Have a backward reduce the shards of some parameters as the window at hand wants it."""
        if self.shards is None:
            return nullcontext()
        return self.shards.around_backward(own, reduce=self.scatters, apart=self.adds_up)

    @property
    def scatters(self) -> bool:
        """Whether the next backward reduces shards, of all that it reaches."""
        return self.shards is not None and (self.reduced or not self.overlap)

    def scattering(self) -> dist.ProcessGroup:
        """Return the ranks whose backwards are added up: all, or those of a replica, which is left apart."""
        return self.shards.within if self.shards is not None and self.adds_up else self.group

    def leaves(self, own: Sequence[Tensor]) -> Iterable[Tensor]:
        """Return what a backward adds gradients of some parameters to: those, or the whole ones of shards."""
        return own if self.shards is None else whole_weights(self.shards.parts)

    def serve(self, owner: object) -> None:
        """Begin, when nothing of `owner` can be refused any more: wrappers reduce nothing by themselves while it lives.

        It is counted only now, so that one which was refused on one rank alone leaves numbers the same on all.
        """
        together = members(self.group)
        _made[together] += 1
        self._number = _made[together]
        keep_quiet(owner, self._wrappers)
        if self.shards is not None:
            shards.sum_only(self.shards.parts)
            shards.average_after(owner, self.shards.parts)

    def refuse_ddp(self) -> None:
        """Before a backward: raise where DDP would reduce in it by itself; after its next forward it would not."""
        if not self.reduced and any(wrapper.require_backward_grad_sync for wrapper in self._wrappers):
            self.prepare(last=False)
            for wrapper in self._wrappers:  # or it waits for a backward since its forward
                getattr(wrapper.reducer, "_reset_state", bool)()
            raise WindowDisturbed(_ABOUT_TO_REDUCE)

    def prepare(self, *, last: bool) -> None:
        """Before a forward: have DDP reduce in its backward if it is the window's last, and only where it should."""
        self.reduced = self.overlap and last
        for wrapper in self._wrappers:
            (let_speak if self.reduced else silence)(wrapper)

    @property
    def hooked(self) -> int:
        """How many wrappers have a communication hook by now that is not called, or that of shards, which is."""
        if self.shards is not None:
            return self.shards.hooked
        return 0 if self.overlap else hooked(self._wrappers)

    def left_by_ddp(self, trained: Sequence[Tensor]) -> int:
        """Return how many wrappers were to reduce in the last backward, and have not, or not all that is trained."""
        if not self.reduced:
            return 0
        return sum(not has_reduced(wrapper) for wrapper in self._wrappers) + left_out(self._wrappers, trained)

    def added(self, numbers: Sequence[Count], device: torch.device, about: Message) -> list[float]:
        """Add up some numbers over all ranks; this waits for the slowest. Raises where one of them has failed."""
        of = self._number * len(_MESSAGES) + _MESSAGES.index(about)
        place = float(of * _LOOPS + self.loops % _LOOPS)
        found = self._sum(_Header(place=place, square=place * place), numbers, device)
        header = _Header(*found[: len(_Header())])
        if header.failed:
            self.spoken = True  # all have heard that something is wrong
            msg = (
                f"{header.failed:g} of {self.size} ranks failed in this window, so it cannot be made; nothing was "
                "changed on this one. The error is in that rank's own output."
            )
            raise RankFailed(msg)
        if header.again:
            self.spoken = self.elsewhere = False  # nothing that was said of this window holds
            raise OthersTryAgain
        if not alike(self.size, header.place, header.square):
            self.spoken = True
            raise WindowError(_ELSEWHERE)
        return found[len(_Header()) : len(_Header()) + len(numbers)]

    def fail(self, device: torch.device) -> None:
        """Tell the others, who wait for this rank's numbers, that there will be none."""
        self.spoken = True
        self._sum(_Header(failed=1.0), (), device)

    def try_again(self, device: torch.device) -> None:
        """Have all ranks, wherever in the window they wait for this one, run it once more, as it does."""
        self._sum(_Header(again=1.0), (), device)

    def _sum(self, header: "_Header", numbers: Sequence[Count], device: torch.device) -> list[float]:
        device = self._wire(device)
        precise = torch.float32 if device.type == "mps" else torch.float64
        rest = _NUMBERS - len(header) - len(numbers)
        assert rest >= 0  # noqa: S101 - a longer row than others send would leave all of them waiting
        said = [*header, *numbers, *[0.0] * rest]
        if any(isinstance(number, Tensor) for number in said):
            row = torch.zeros(_NUMBERS, dtype=precise, device=device)
            for place, number in enumerate(said):
                row[place] = number
        else:
            row = torch.tensor(said, dtype=precise, device=device)
        with naming_lost_ranks():
            dist.all_reduce(row, group=self.group)
            found: list[float] = row.tolist()
        return found

    def _wire(self, device: torch.device) -> torch.device:
        """Return where to send from: shards may wait in host memory, and their group may know no way from there."""
        return device if self.shards is None else self.shards.device

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest of all ranks' numbers."""
        total, squares = self.added([float(number), float(number * number)], device, "passes")
        if alike(self.size, total, squares):
            return number
        # They know by now that all of them ask for it: another one, who adds up, would not be understood.
        largest = torch.tensor(float(number), device=self._wire(device))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return round(largest.item())

    def span(
        self, number: Count | None, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> tuple[float, float]:
        """Return the least and the largest of all ranks' numbers, or of those in a group; some may have none."""
        device = self._wire(device)
        found = torch.full(
            (2,), -math.inf, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device
        )
        if number is not None:
            found[0], found[1] = -number, number
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group or self.group)
        least, most = found.tolist()
        return -least, most

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the norm of a gradient that is sharded: over the ranks of one replica, which has all of it."""
        own = torch.nn.utils.get_total_norm([local(p.grad) for p in parameters if p.grad is not None])
        wire = self._wire(device)
        square = own.to(wire, torch.float32 if wire.type == "mps" else torch.float64).square()
        assert self.shards is not None  # noqa: S101 - or no rank has a part of it
        dist.all_reduce(square, group=self.shards.within)
        return square.sqrt().to(device, own.dtype)

    def share_flags(self, flags: Sequence[Tensor]) -> None:
        """Have flags that are up on any rank be so on all, in place."""
        found = torch.stack([flag.to(self._wire(flags[0].device)) for flag in flags])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        for flag, up in zip(flags, found, strict=True):
            flag.copy_(up)

    def failed_anywhere(self, *, here: bool, device: torch.device) -> bool:
        """Return whether any rank has failed, this one included."""
        failed = torch.tensor(float(here), device=self._wire(device))
        self.share_flags([failed])
        return bool(failed)

    def anywhere(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return of each flag whether any rank has it up."""
        found = torch.tensor(flags, dtype=torch.uint8, device=self._wire(device))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found.tolist()]

    def unlike(self, numbers: Sequence[float], device: torch.device) -> list[bool]:
        """Return of each number whether ranks have different ones."""
        both = [[each, each * each] for each in numbers]
        row = torch.tensor(both, dtype=torch.float64, device=self._wire(device))
        dist.all_reduce(row, group=self.group)
        return [not alike(self.size, total, squares) for total, squares in row.tolist()]

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """Add up tensors over all ranks, in place; shards over their replicas."""
        group = self.group if self.shards is None else self.shards.replicas
        if self.size > 1 and group is not None:
            add_up(gradients, group, self._wire)

    def share_buffers(self) -> None:
        """Send the first rank's buffers to all, as DDP does where it was told to."""
        for wrapper in self._wrappers:
            wanted = getattr(wrapper, "forward_sync_buffers", None)  # broadcast_buffers before torch 2.13
            if (wrapper.broadcast_buffers if wanted is None else wanted) and wrapper.modules_buffers:
                wrapper._sync_buffers()  # noqa: SLF001 - as its own forward does


def serve(owner: object, ranks: Ranks | None, models: Sequence[nn.Module]) -> None:
    """Begin with others, or alone: DDP of one process has nothing to reduce, and would refuse what ranks may have."""
    if ranks is None:
        keep_quiet(owner, data_parallel(models))
    else:
        ranks.serve(owner)


_ELSEWHERE = (
    "the ranks are at different places: one closes a window that another has not come to, or has no part in, or one "
    "has left its loop over `over` by break and begun another.\n"
    "Have every rank close the same windows in the same order, and break on all in the same one. Where one "
    "accumulator's `over` is inside another's, every rank needs as many batches; where the model is sharded, the same "
    "steps=; where samples are coupled, every rank needs samples in each update. And every rank must have made as many "
    "accumulators and BigSteps with the others, also of those that it does not use."
)


_ABOUT_TO_REDUCE = (
    "DistributedDataParallel is about to reduce in this backward, and bigbatch reduces once per update: something has "
    "set require_backward_grad_sync since, as the end of a no_sync() does. Nothing was added.\n"
    "Leave no_sync() out: DDP is kept quiet while this accumulator lives."
)


def alike(ranks: int, total: float, squares: float) -> bool:
    """Whether a number is the same on all ranks, by its sum over them and that of its squares.

    Two numbers that differ by a part of 1e-6 are alike within 1e-12. One that is not finite tells nothing.
    """
    return not abs(ranks * squares - total * total) > _SAME * ranks * squares

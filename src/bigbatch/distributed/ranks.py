"""Several processes that make one big batch together, and what they send each other beside gradients: rows of numbers.

Every rank adds up its own micro-batches and says nothing meanwhile. When its window closes it contributes a row of
numbers, and gets those of all others (`statement.py`). Then everyone knows what the big batch counted, each rank weighs
its sum by that, and the gradients cross the wire once.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.fingerprint import parameters_in_one
from bigbatch.distributed.statement import Agreement, Row, Statement, agree, fingerprint
from bigbatch.distributed.team import Gradients, Team
from bigbatch.errors import (
    BatchError,
    BigBatchError,
    ConfigurationError,
    LossError,
    PathsDiffer,
    RankFailed,
    SeveralCounts,
    WindowError,
)
from bigbatch.loss.count import Count, TotalOfSum

Message = Literal["statement", "totals", "passes", "meeting", "beginning", "unit", "failed"]
_MESSAGES = ("statement", "totals", "passes", "meeting", "beginning", "unit", "failed")
_NUMBERS = 40  # in every row: a rank that fails need not know which one the others wait for
_HEADER = 3  # numbers that each row begins with: whether it has failed, whether it tries again, its place
_TERMS = 16  # with totals that are counted in advance
_LOOPS = 1 << 24  # that are told apart
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()  # objects that a group serves


class OthersTryAgain(BigBatchError):
    """Raised where another rank runs the window once more, and so will `BigStep` on all of them."""


class Ranks(Team):
    """One group of processes, as one of them sees it: those that have samples of their own."""

    is_alone = False

    def __init__(self, group: dist.ProcessGroup, wrappers: Sequence[DistributedDataParallel] = ()) -> None:
        """Belong to a group; `wrappers` are what this process has its models in."""
        super().__init__(wrappers)
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._names = dist.get_process_group_ranks(group)
        self.windows = 0  # made together until now
        self._loops = 0
        self._number = 0  # of all that these processes make together: the same on every rank

    def serve(self, owner: object) -> None:
        """Begin, when nothing of `owner` can be refused any more.

        It is counted only now, so that one which was refused on one rank alone leaves numbers the same on all.
        """
        super().serve(owner)
        self._number = _made[self.group] = _made.get(self.group, 0) + 1

    def begin_loop(self) -> None:
        """Begin a loop over batches: a window of one epoch is not made with that of another."""
        self._loops += 1

    def wire(self, device: torch.device) -> torch.device:
        """Return where to send from what is on a device."""
        return torch.device("cpu") if device.type == "mps" else device  # which has no float64

    def rows(self, about: Message, numbers: Sequence[Count], device: torch.device) -> list[list[float]]:
        """Contribute a row of numbers; returns those of all ranks. Raises where one has failed, or is elsewhere."""
        place = float((self._number * len(_MESSAGES) + _MESSAGES.index(about)) * _LOOPS + self._loops % _LOOPS)
        found = self._gather([0.0, 0.0, place, *numbers], device)
        failed = [str(name) for name, row in zip(self._names, found, strict=True) if row[0]]
        if failed:
            self.spoken = True  # all have heard that something is wrong
            raise RankFailed(
                f"{'ranks' if len(failed) > 1 else 'rank'} {', '.join(failed)} failed in this window, so it cannot be "
                "made; nothing was changed on this one. The error is in the output of that rank."
            )
        if any(row[1] for row in found):
            self.spoken = self.elsewhere = False  # nothing that was said of this window holds
            raise OthersTryAgain
        if len({row[2] for row in found}) > 1:
            self.spoken = True
            raise WindowError(_ELSEWHERE, fix=_IN_STEP)
        return [row[_HEADER : _HEADER + len(numbers)] for row in found]

    def fail(self, device: torch.device) -> None:
        """Tell the others, who wait for this rank's numbers, that there will be none."""
        self.spoken = True
        self._gather([1.0], device)

    def try_again(self, device: torch.device) -> None:
        """Have all ranks, wherever in the window they wait for this one, run it once more, as it does."""
        self._gather([0.0, 1.0], device)

    def _gather(self, numbers: Sequence[Count], device: torch.device) -> list[list[float]]:
        assert len(numbers) <= _NUMBERS  # noqa: S101 - a longer row than others send would leave all of them waiting
        here = [0.0 if isinstance(number, Tensor) else number for number in numbers]
        row = torch.tensor([*here, *[0.0] * (_NUMBERS - len(here))], dtype=torch.float64, device=self.wire(device))
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                row[place] = number
        every = row.new_empty(self.size, _NUMBERS)
        with naming_lost_ranks():
            dist.all_gather(list(every.unbind()), row, group=self.group)
            found: list[list[float]] = every.tolist()
        return found

    def _exchange(self, own: Any) -> list[Any]:
        """Return the words of all ranks, where they are known to differ."""
        self.spoken = True  # all have heard that something is wrong
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest of all ranks' numbers."""
        return round(max(row[0] for row in self.rows("passes", [float(number)], device)))

    def share_flags(self, flags: Sequence[Tensor]) -> None:
        """Have flags that are up on any rank be so on all, in place."""
        found = torch.stack([flag.to(self.wire(flags[0].device)) for flag in flags])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        for flag, up in zip(flags, found, strict=True):
            flag.copy_(up)

    def failed_anywhere(self, *, here: bool, device: torch.device) -> bool:
        """Return whether any rank has failed, this one included."""
        return any(row[0] for row in self.rows("failed", [float(here)], device))

    def announce(self, title: str, device: torch.device) -> None:
        """Say which collective this rank has come to; raise on all ranks where they have come to different ones."""
        codes = self.rows("meeting", [fingerprint(title)], device)
        if all(code == codes[0] for code in codes):
            return
        titles = self._exchange(title)
        listed = "\n".join(f"    rank {rank} is at {each}" for rank, each in zip(self._names, titles, strict=True))
        raise PathsDiffer(
            "the ranks of this window took different paths, and cannot go on together:\n"
            f"{listed}\n"
            "All must run the same operations across micro-batches in the same order, also in backward. Look for an "
            "`if` on the rank or on the data, a layer that is skipped for some, or tensors of different shapes."
        )

    def check_batches(self, device: torch.device, *, has_batches: bool) -> None:
        """Make sure, before DDP reduces by itself, that all ranks have batches, or none: it could not be told there."""
        if not self.overlap or self.sharded:
            return
        there = [bool(row[0]) for row in self.rows("beginning", [float(has_batches)], device)]
        if any(there) and not all(there):
            without = ", ".join(str(name) for name, has in zip(self._names, there, strict=True) if not has)
            raise BatchError(
                f"rank {without} has no batch in this `over`, and with overlap=True all need as many windows.",
                fix="Accumulator(...) without overlap=True: ranks may then have any number of micro-batches, or none",
            )

    def open_window(self) -> None:
        """Begin a window, of which nothing was said yet."""
        self.spoken = self.elsewhere = False

    def totals(self, own: tuple[Count, ...], device: torch.device) -> tuple[Count, ...]:
        """Add up totals that were counted in advance; a rank without a micro-batch has none, and gets those of others.

        Who has none sends no terms.
        """
        if len(own) > _TERMS:
            raise ConfigurationError(
                f"a loss over several ranks can have {_TERMS} terms with counts of their own.", found=f"{len(own)}"
            )
        sums = [float(isinstance(each, TotalOfSum)) for each in own]
        rest = [0.0] * (_TERMS - len(own))
        rows = self.rows("totals", [float(len(own)), *sums, *rest, *own, *rest], device)
        there = [row for row in rows if row[0]]
        if len({tuple(row[: 1 + _TERMS]) for row in there}) > 1:
            raise LossError(
                "the ranks of this window have different losses: another number of terms over data, or a mean here "
                "and a sum there. One big batch has one loss.",
                fix="every term on every rank, times 0 where it does not apply",
            )
        if not there:
            return ()
        number = round(there[0][0])
        columns = list(zip(*(row[1 + _TERMS : 1 + _TERMS + number] for row in there), strict=True))
        return tuple(
            TotalOfSum(1.0) if is_sum else sum(column)
            for is_sum, column in zip(there[0][1 : 1 + number], columns, strict=True)
        )

    def agree_on_unit(self, total: Count, device: torch.device) -> float | None:
        """Return one unit of weights: what a window counts, if all micro-batches are like the first of `total`."""
        self.unit = max(sum(row[0] for row in self.rows("unit", [total], device)), 1.0)
        return self.unit

    def agree(self, mine: Agreement, statement: Callable[..., Statement], gradients: Gradients) -> Agreement:
        """Contribute this rank's row and get those of all others. This waits: for the slowest rank, and the device.

        Where ranks cannot make one batch of what they have, all of them raise the same error.
        """
        said: Statement = statement(first=not self.windows)
        return self._agreed(self._completed(said.with_totals(mine), gradients), said, gradients.device)

    def _agreed(self, row: Row, said: Statement, device: torch.device) -> Agreement:
        self.spoken = True
        rows = [Row(*each) for each in self.rows("statement", row, device)]
        found = agree(rows, lambda name: self._exchange(said.words[name]), self._names, sharded=self.sharded)
        self.others_go_on = bool(found.going > row.going)
        return found

    def _completed(self, row: Row, gradients: Gradients) -> Row:
        """Return a row with what this team knows of the gradients and of itself."""
        return row._replace(
            windows=float(self.windows),
            parameters=parameters_in_one(gradients.every),
            missing=float(sum(p.grad is None for p in gradients.parameters)),
        )

    def anywhere(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return of each flag whether any rank has it up."""
        found = torch.tensor(flags, dtype=torch.uint8, device=self.wire(device))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found.tolist()]

    def check_finite(self, gradients: Gradients) -> None:
        """Raise on all ranks where a micro-batch that counts nothing may have left 0 / 0 in the gradient."""
        finite = bool(torch.isfinite(gradients.norm())) if gradients.dense() else True
        if self.failed_anywhere(here=not finite, device=gradients.device):
            raise LossError(
                "the gradient is not finite, and a micro-batch of this window counts nothing, on this rank or "
                "another: where its loss divides by its count by hand, 0 / 0 stands in its gradient, which all ranks "
                "got in its backward. Nothing was stepped.",
                fix="loss = (values * mask).sum() / mask.sum().clamp(min=1), with count=mask.sum()",
            )

    def stepped(self) -> None:
        """Note that a window was made together."""
        self.windows += 1

    @contextmanager
    def telling_of_failure(self, device: torch.device) -> Iterator[None]:
        """Tell other ranks, who wait for this one's statement, of an error inside, if they have not heard from it."""
        self.spoken = self.elsewhere = False
        try:
            with naming_lost_ranks():
                yield
        except Exception as error:
            if not self.spoken and not self.elsewhere and not is_of_the_wire(error):
                with suppress(Exception):  # they may be gone; what happened here is what is raised
                    self.fail(device)
            raise

    def tell_of_several(self, device: torch.device) -> None:
        """Tell others that counts must be known in advance."""
        if not self.spoken:
            with suppress(SeveralCounts):
                self._agreed(Row(several=1.0), Statement(Row()), device)


def is_of_the_wire(error: BaseException) -> bool:
    """Whether an error is torch's word, or ours, for a rank that is gone; gloo's have no type of their own."""
    ours = isinstance(error, RankFailed | dist.DistError)
    return ours or (isinstance(error, RuntimeError) and "gloo/" in str(error))


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise a RankFailed where torch loses the connection to another rank."""
    try:
        yield
    except RuntimeError as error:
        if is_of_the_wire(error) and not isinstance(error, RankFailed):
            raise RankFailed(
                "another rank has ended, or does not answer, so this window cannot be made. The error is in that "
                "rank's own output (it may have run out of memory, or been killed).",
                fix="all ranks started again, from a checkpoint",
            ) from error
        raise


_ELSEWHERE = (
    "the ranks are at different places: one closes a window that another has not come to, or has no part in, or one "
    "has left its loop over `over` by break and begun another."
)
_IN_STEP = (
    "on every rank the same windows in the same order (break on all in the same one), the same steps=, as many batches "
    "where one `over` is inside another's, samples in each update where they are coupled, and as many accumulators and "
    "BigSteps"
)

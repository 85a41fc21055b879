"""Several processes that make one big batch together, and what they send each other beside gradients: rows of numbers.

Every rank adds up its own micro-batches and says nothing meanwhile. When its window closes it contributes a row of
numbers, and gets those of all others (`statement.py`). Then everyone knows what the big batch counted, each rank weighs
its sum by that, and the gradients cross the wire once.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.statement import Statement, Words, agree, fingerprint, trained
from bigbatch.distributed.team import Team, speak
from bigbatch.errors import BigBatchError, LossError, PathsDiffer, RankFailed, SeveralCounts, WindowError
from bigbatch.loss.count import LOW_PRECISION, Count, TotalOfSum

if TYPE_CHECKING:
    from bigbatch.window.gradients import Gradients

_BUCKET = 32 << 20  # bytes that are sent at once: enough to fill a wire, and small beside a model
_NUMBERS = 40  # in every row: a rank that fails need not know which one the others wait for
_FAILED, _AGAIN, _SEVERAL = 1, 2, 3  # codes: a rank has failed, tries again, needs counts in advance
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()  # objects that a group serves


class OthersTryAgain(BigBatchError):
    """Raised where another rank runs the window once more, and so will `BigStep` on all of them."""


class Ranks(Team):
    """One group of processes, as one of them sees it: those that have samples of their own.

    `wrappers` are what this process has its models in.
    """

    is_alone = False

    def __init__(
        self, group: dist.ProcessGroup, wrappers: Sequence[DistributedDataParallel] = (), *, overlap: bool = False
    ) -> None:
        super().__init__(wrappers)
        self.group = group
        self.overlap, self._last = overlap, False  # whether the next backward is the window's last
        self.in_common = overlap or self.sharded
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._names = dist.get_process_group_ranks(group)
        self._loops = 0
        self.apart: dist.ProcessGroup | None = group  # whose gradients are added up when a window closes, if any
        self._reached = 0  # one number of the shards that backwards have reached since ranks compared it

    def serve(self, owner: object) -> None:
        """Begin. It is counted only now, so that one which was refused on one rank alone leaves numbers the same."""
        super().serve(owner)
        # Of all that these processes make together: the same on every rank.
        self._number = _made[self.group] = _made.get(self.group, 0) + 1

    def prepare(self, *, last: bool) -> None:
        """Before a forward: say whether its backward is the window's last; DDP reduces in that one, where it should."""
        self._last = last
        for wrapper in self.wrappers:
            speak(wrapper, backward=self.overlap and last, forward=False)

    def open_window(self) -> None:
        """Begin a window, of which nothing was said yet, and nothing was reduced."""
        self.spoken = self.elsewhere = self.holds_back = self.reduced = False

    def wire(self, device: torch.device) -> torch.device:
        """Return where to send from what is on a device: shards may wait where their group knows no way from."""
        return self.device or device

    def rows(
        self, place: str, numbers: Sequence[Count], device: torch.device, *, code: int = 0, is_across: bool = False
    ) -> list[list[float]]:
        """Contribute a row of numbers; returns those of all ranks, padded with zeros.

        Raises on all ranks where one has failed, or has come to another place; `is_across`: one inside of a loss.
        """
        place = f"{place} (loop {self._loops} of Accumulator or BigStep {self._number})"
        found = self._gather([code, fingerprint(place), *numbers], device)
        codes = [row[0] for row in found]
        if _FAILED in codes:
            failed = ", ".join(str(name) for name, each in zip(self._names, codes, strict=True) if each == _FAILED)
            raise RankFailed(
                f"rank {failed} failed in this window: its output has the error. Nothing was changed on this one."
            )
        if _AGAIN in codes:
            self.spoken = self.elsewhere = False  # nothing that was said of this window holds
            raise OthersTryAgain
        if _SEVERAL in codes:
            self.spoken = True
            raise SeveralCounts("the terms of this loss were averaged over different things, on some rank.")
        if len({row[1] for row in found}) > 1:
            said = self._exchange((is_across, place))
            listed = "".join(f"\n    rank {rank}: {each}" for rank, (_, each) in zip(self._names, said, strict=True))
            raise (PathsDiffer if all(inside for inside, _ in said) else WindowError)(
                f"the ranks are at different places, and cannot go on together:{listed}",
                fix="the same windows on every rank: break on all or none, the same steps=, as many accumulators and "
                "BigSteps; and the same operations and shapes of `across` in the same order, no `if` on the rank",
            )
        return [numbers for _, _, *numbers in found]

    def try_again(self, device: torch.device) -> None:
        """Have all ranks, wherever in the window they wait for this one, run it once more, as it does."""
        self._gather([_AGAIN], device)

    def tell_of_several(self, device: torch.device) -> None:
        """Tell others that counts must be known in advance."""
        if not self.spoken:
            with suppress(SeveralCounts):
                self.rows("the end of a window", [], device, code=_SEVERAL)

    def _gather(self, numbers: Sequence[Count], device: torch.device) -> list[list[float]]:
        here = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
        row = torch.tensor([*here, *[0.0] * (_NUMBERS - len(here))], dtype=torch.float64, device=self.wire(device))
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                row[place] = number
        every = row.new_empty(self.size, _NUMBERS)
        with naming_lost_ranks():
            dist.all_gather(list(every.unbind()), row, group=self.group)
            return every.tolist()

    def _exchange(self, own: Any) -> list[Any]:
        self.spoken = True  # all have heard that something is wrong
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def announce(self, title: str, device: torch.device) -> None:
        """Say which collective this rank has come to; raise on all ranks where they have come to different ones."""
        self.rows(title, [], device, is_across=True)

    def numbers(self, own: int, device: torch.device) -> list[int]:
        """Return one whole number of every rank, in their order."""
        return [round(row[0]) for row in self.rows("a number of each rank", [own], device)]

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest of all ranks' numbers."""
        return max(self.numbers(number, device))

    def begin_loop(self, device: torch.device, *, has_batches: bool) -> None:
        """Begin a loop; where DDP reduces by itself, all ranks must have batches, or none: it cannot be told there."""
        self._loops += 1
        if self.overlap and not self.sharded:
            self.rows(f"a loop over {'some' if has_batches else 'no'} batches", [], device)

    def check_loss(self, dtype: torch.dtype) -> None:
        """Before a backward: raise where it would not be added up as it should."""
        if self.in_common and dtype in LOW_PRECISION:
            raise LossError(
                f"this loss is of {dtype}, which rounds its weight; with fully_shard or overlap=True it stays so.",
                fix="a loss in float32:  criterion(logits.float(), labels)",
            )

    def totals(self, own: tuple[Count, ...], device: torch.device) -> tuple[Count, ...]:
        """Add up totals that were counted in advance; a rank without a micro-batch has none, and gets those of others.

        That of a sum is sent as -1.
        """
        said = [-1.0 if isinstance(each, TotalOfSum) else each for each in own]
        there = [row for row in self.rows("totals in advance", [len(own), *said], device) if row[0]]
        if len({(row[0], *(each < 0 for each in row)) for row in there}) > 1:
            raise LossError(
                "the ranks of this window have different losses: other numbers of terms, or means and sums.",
                fix="every term on every rank, times 0 where it does not apply",
            )
        columns = list(zip(*there, strict=True))[1 : 1 + round(max((row[0] for row in there), default=0))]
        return tuple(TotalOfSum(1.0) if column[0] < 0 else sum(column) for column in columns)

    def agree(self, mine: Statement, words: Words, gradients: "Gradients") -> Statement:
        """Contribute this rank's row and get those of all others. This waits: for the slowest rank, and the device.

        Where ranks cannot make one batch of what they have, all of them raise the same error.
        """
        mine = mine._replace(missing=any(p.grad is None for p in gradients.parameters))
        common = {**words["common"], "parameters trained": trained(gradients.every), "windows made": str(self.windows)}
        if self.overlap and not self.sharded:
            common["batches left, with overlap=True"] = str(bool(mine.going))
        words = {**words, "common": common}
        form, same = (fingerprint(*words[name].values()) for name in ("form", "common"))
        self.spoken = True
        rows = self.rows("the end of a window", mine._replace(form=form, common=same).numbers, gradients.device)
        found = agree(rows, lambda name: self._exchange(words[name]), self._names)
        self.others_go_on = found.going > mine.going
        return found

    def reduce(self, gradients: "Gradients", correction: Count, agreement: Statement) -> Count:
        """Correct the gradients, and add up what backwards have not; those that only other ranks have reached, too."""
        if self.apart is None or self.reduced:
            gradients.scale(correction * self.size if self.reduced else correction)  # DDP has averaged
            return 1.0
        if agreement.missing:
            came = [p.grad is not None for p in gradients.parameters]
            anywhere = torch.tensor(came, dtype=torch.uint8, device=self.wire(gradients.device))
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
            gradients.fill(anywhere.bool().tolist())
        gradients.scale(correction)
        dense = gradients.dense()
        for device in dict.fromkeys(gradient.device for gradient in dense):
            for bucket in _take_tensors([gradient for gradient in dense if gradient.device == device], _BUCKET):
                # A lone tensor may be large, and is sent from where it is.
                flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([each.reshape(-1) for each in bucket])
                flat = flat.to(self.wire(flat.device))
                dist.all_reduce(flat, group=self.apart)
                if flat.data_ptr() != bucket[0].data_ptr():
                    torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))
        return 1.0

    # Values of all ranks, where samples are coupled. Ranks that come to different collectives would send each other
    # tensors of other sizes, and end in torch or never. So each says first, in a row, which one it has come to.

    @contextmanager
    def collective(self, title: str, device: torch.device) -> Iterator[None]:
        """Inside, run a collective that all ranks run under one title, if any: they take no message for a part of it.

        They wait for it as soon as the title was sent, so a rank that fails from then on cannot tell them.
        """
        was, self.elsewhere = self.elsewhere, True
        if title:
            self.announce(title, device)
        yield
        self.elsewhere = was

    def summed(self, own: Tensor, title: str = "") -> Tensor:
        """Add up a tensor over all ranks, under a title or none."""
        with self.collective(title, own.device):
            found = own.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(found, group=self.group)
        return found

    def stacked(self, own: Tensor) -> Tensor:
        """Return a tensor of every rank, stacked."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own.detach().contiguous(), group=self.group)
        return torch.stack(found)

    def gathered(self, own: Tensor, title: str) -> tuple[Tensor, int]:
        """Return the rows of all ranks, and where this one's begin."""
        with self.collective(title, own.device):
            rows = self.numbers(own.shape[0], own.device)
            padded = own.new_zeros(max(rows), *own.shape[1:])
            padded[: own.shape[0]] = own.detach()
            every = self.stacked(padded)
        return torch.cat([part[:number] for part, number in zip(every, rows, strict=True)]), sum(rows[: self.rank])

    @contextmanager
    def telling_of_failure(self, device: torch.device) -> Iterator[None]:
        """Tell other ranks, who wait for this one's statement, of an error inside, if they have not heard from it."""
        self.spoken = self.elsewhere = False
        try:
            with naming_lost_ranks():
                yield
        except Exception as error:
            if not self.spoken and not self.elsewhere and not is_of_the_wire(error):
                self.spoken, self._reached = True, 0
                with suppress(Exception):  # they may be gone; what happened here is what is raised
                    self._gather([_FAILED], device)
            raise


def is_of_the_wire(error: BaseException) -> bool:
    """Whether an error is torch's word, or ours, for a rank that is gone; gloo's have no type of their own."""
    return isinstance(error, RankFailed | dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise a RankFailed where torch loses the connection to another rank."""
    try:
        yield
    except RuntimeError as error:
        if is_of_the_wire(error) and not isinstance(error, RankFailed):
            raise RankFailed(
                "another rank has ended, or does not answer. The error is in that rank's own output, unless the system "
                "has killed it.",
                fix="all ranks started again, from a checkpoint",
            ) from error
        raise

"""A loader whose last batch is known: by its length, or by looking ahead one batch; a window, to count it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MappingView, Sized
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bigbatch.batch.tree import digest, leaves
from bigbatch.errors import BatchError, ConfigurationError
from bigbatch.loss.count import Count, TotalOfSum, checked_count, finite

Batch = TypeVar("Batch")
Turns: TypeAlias = Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]  # batches; the last? its window's totals
_ALIKE = 16  # so many at most are compared where nothing tells them apart


@dataclass(eq=False)
class Loop:
    """One pass over a loader, as `backward` sees it."""

    of_over: bool = True  # or written by hand: no batch is known to be the last, and nobody counts calls
    begun: bool = False  # whether it has given out a batch, or has none
    spent: bool = True  # whether the batch at hand has had its backward
    last: bool = False  # whether it is the loader's last
    totals: tuple[Count, ...] | None = None  # of its window, where they are counted in advance
    repeated: bool = False  # whether it was given out before, so that this rank passes by with the others
    batch: Any = None  # at hand
    asked: int = 0  # how often anyone had asked for other micro-batches when it was given out
    promised: bool = True  # whether other ranks expect a window of it: those that begin expect one at least

    def is_of_one(self) -> bool:
        """Whether the batch at hand has one sample: one row in each of its tensors."""
        return {leaf.shape[0] for _, leaf in leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dim()} == {1}


def no_loop() -> Loop:
    """Stand for a loop that is written by hand; it promises nothing."""
    return Loop(of_over=False, spent=False, promised=False)


@dataclass(frozen=True)
class Needs:
    """What an accumulator must know of the batches to come."""

    remaining: Callable[[], int]  # how many micro-batches are missing until the window is full
    counts: Callable[[Any], Any] | None  # the counts of a batch, where a window's totals must be known in advance
    most: Callable[[int], int] | None  # the most that any rank has, where each pass is a meeting of all
    the_last: bool  # whether the last batch must be known before it is used


class Source(Generic[Batch]):
    """The batches of a loader, in turn. It reads ahead only what it must, and loses none."""

    def __init__(self, loader: Iterable[Batch], needs: Needs) -> None:
        """Begin; a loader with a state of its own is not read ahead, unless the last batch must be known."""
        self.iterator, self.held, self._needs = iter(loader), deque[Batch](), needs
        self._length, self._read = _trusted_length(loader), 0
        wrapped = (loader, getattr(loader, "dataset", None), getattr(loader, "iterable", None))  # the latter by tqdm
        self._looks_ahead = needs.the_last or not any(hasattr(each, "state_dict") for each in wrapped)
        self._compared = 1  # so many, held together, were seen not to be written over
        self._ended = False
        self._failure: Exception | None = None  # of reading ahead; the batches before it come first

    def turns(self, loop: Loop) -> Turns[Batch]:
        """Give out the batches, each with whether it is the last, as far as that is known."""
        if self._needs.counts is not None:
            return self._windows(self._needs.counts)
        return self._one_by_one() if self._needs.most is None else self._in_company(self._needs.most, loop)

    def _one_by_one(self) -> Turns[Batch]:
        length = self._length
        # On the shortest way: small models feel it.
        for number, batch in enumerate(self.iterator if length is not None else (), 1):
            if length is not None and number > length:
                raise BatchError(_TOO_MANY.format(length))
            yield batch, number == length, None
        while length is None and self._look(1):
            last = self._is_last()
            yield self.held.popleft(), last, None

    def _in_company(self, most: Callable[[int], int], loop: Loop) -> Turns[Batch]:
        """Go on as long as any rank has batches; who has none left gives out the last one again, for nothing."""
        if not _number_of_all(int(self._look(1) > 0), most):
            return
        batch, last, more = self.held[0], self._is_last(), True
        while more:
            more = most(int(not last)) > 0
            if not loop.repeated:
                batch = self.held.popleft()
            yield batch, not more, None
            loop.repeated = not self._look(1)
            last = loop.repeated or self._is_last()

    def _windows(self, counts: Callable[[Any], Any]) -> Turns[Batch]:
        while True:
            steps = self._needs.remaining()
            number = min(self._look(steps), steps)
            if self._needs.most is not None:
                _number_of_all(number, self._needs.most)
            if not number:
                return
            totals = _totals([counts(batch) for batch in islice(self.held, number)])
            for left in reversed(range(number)):
                last = not left and self._is_last()
                yield self.held.popleft(), last, totals

    def _is_last(self) -> bool:
        """Tell whether no other comes after the next batch, as far as that is known."""
        if len(self.held) == 1 and self._length is not None and not self._ended:
            return self._read == self._length
        if self._looks_ahead:
            self._look(2)
        return self._ended and len(self.held) == 1

    def _look(self, number: int) -> int:
        """Read on until so many are held, or the end; returns how many are."""
        before = [digest(batch) for batch in self.held] if number > self._compared else None
        if before and None in before and not self._needs.the_last:  # nobody could tell if it were written over
            number, self._looks_ahead = 0, self._read < _ALIKE  # another one may be told
        while len(self.held) < number and self._read_on():
            if before is not None:
                before.append(digest(self.held[-1]))
        if before:
            self._compare(before)
        return len(self.held)

    def _read_on(self) -> bool:
        """Read a batch; returns whether there was one. Where the loader failed, the batches before it come first."""
        if self._ended or (self._failure and self.held):
            return False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        try:
            self.held.append(next(self.iterator))
        except StopIteration:
            self._ended = True
            return False
        except Exception as error:
            if not self.held:
                raise
            self._failure = error
            return False
        self._read += 1
        if self._length is not None and self._read > self._length:
            raise BatchError(_TOO_MANY.format(self._length))
        return True

    def _compare(self, before: list[int | None]) -> None:
        """Refuse batches that were written over while others were read; those that are alike tell nothing yet."""
        now = [digest(batch) for batch in self.held]
        if any(None not in pair and pair[0] != pair[1] for pair in zip(now, before, strict=True)):
            self.held.clear()
            raise BatchError(
                "this loader writes each batch over the one before it, and `over` reads ahead: the last batch is known "
                "by it.",
                fix="accumulator.over(copy.deepcopy(batch) for batch in loader)",
            )
        if (None not in now and len(set(before)) == len(before)) or self._read > _ALIKE:
            self._compared = len(before)


class Over(Generic[Batch]):
    """A loader's batches, with the accumulator told beforehand which one is the last.

    Any iterable will do: a loader, a generator, an endless stream. `len` and the loader's own attributes (`sampler`,
    `dataset`, `set_epoch`) are forwarded where there are any.
    """

    def __init__(
        self, loader: Iterable[Batch], needs: Needs, run: "Callable[[Over[Batch], Iterable[Batch]], Iterator[Batch]]"
    ) -> None:
        """Wrap a loader; nothing is read from it yet. `run` gives out its batches, in a loop of the accumulator."""
        self.in_company = needs.most is not None  # whether all ranks are given as many
        if isinstance(loader, Over) and (needs.counts is not None or (self.in_company and not loader.in_company)):
            raise ConfigurationError(
                "an accumulator with counts= looks a window ahead, and one of a sharded model repeats batches, which "
                "the other would not hear of.",
                fix="this one inside:  other.over(this.over(loader))",
            )
        self._loader, self._run = loader, run
        self.loop: Loop = no_loop()  # the latest

    def __len__(self) -> int:
        loader: Any = self._loader
        return len(loader)

    def __bool__(self) -> bool:
        with suppress(TypeError):
            return len(self) > 0
        return True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader; private and special ones stay its own."""
        if not name.startswith("_") and hasattr(self._loader, name):
            return getattr(self._loader, name)
        msg = f"this loader is a {type(self.__dict__.get('_loader')).__name__}, which has no attribute {name!r}"
        raise AttributeError(msg, name=name, obj=self)

    def __iter__(self) -> Iterator[Batch]:
        """Give out the batches; a window left open by the end of the loader is closed."""
        return self._run(self, self._loader)

    def turns(self, loop: Loop) -> Turns[Batch]:
        """Give out the batches to the loop of another accumulator; this one knows the last batch for both."""
        for batch in self:
            loop.repeated = self.loop.repeated
            yield batch, self.loop.last, None


def _trusted_length(loader: Iterable[Any]) -> int | None:
    """Return how many batches a loader has, where that is no estimate: of sequences and of datasets with a length."""
    if isinstance(loader, DataLoader):
        trusted = not isinstance(loader.dataset, IterableDataset)
    else:
        trusted = hasattr(type(loader), "__getitem__") or isinstance(loader, AbstractSet | MappingView)
    if trusted and isinstance(loader, Sized):
        with suppress(TypeError, NotImplementedError):  # a sampler need not know
            return len(loader)
    return None


def _number_of_all(own: int, most: Callable[[int], int]) -> int:
    """Return how many micro-batches all ranks have ahead; raise on all of them where one has fewer than another."""
    largest, smallest = most(own), -most(-own)
    if largest != smallest:
        raise BatchError(
            f"ranks have {smallest} to {largest} micro-batches ahead, {own} here, and every pass through a sharded "
            "model needs all ranks. One that runs out repeats its last batch, if it has any and there are no counts=.",
            fix="a share of the samples for every rank, Subset(data, order[rank::size]); with counts=, as many batches "
            "and steps, DistributedSampler(..., drop_last=True)",
        )
    return largest


def _totals(counted: list[Any]) -> tuple[Count, ...]:
    """Add up the counts of a window's batches, term by term."""
    rows = [row if isinstance(row, tuple | list) else (row,) for row in counted]
    if len({len(row) for row in rows}) > 1:
        msg = f"counts= must return as many counts for every batch; it returned {[len(row) for row in rows]}"
        raise ConfigurationError(msg)
    totals: list[Count] = []
    for column in zip(*rows, strict=True):
        checked = [checked_count(count) for count in column]
        if all(kind == "sum" for kind, _ in checked):
            totals.append(TotalOfSum(1.0))
        else:
            totals.append(finite(sum((number for _, number in checked[1:]), start=checked[0][1])))
    return tuple(totals)


_TOO_MANY = (
    "this loader has a length of {0}, and gave out more batches: the last window was closed after batch {0}.\n"
    "Correct its __len__ (or its sampler's), or have it not asked for:  accumulator.over(iter(loader))"
)

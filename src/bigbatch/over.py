"""A loader that looks ahead: one batch, to know the last one; or a window, to count it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from bigbatch.errors import BatchError, ConfigurationError
from bigbatch.reading.counts import Count, TotalOfSum, checked_count

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Listener:
    """What an `Over` tells the accumulator that made it, and asks of it."""

    opening: Callable[[], object]  # iteration begins
    announce: Callable[[bool, tuple[Count, ...] | None], None]  # the next batch is the last; its window's totals
    exhausted: Callable[[], object]  # all batches were given out
    left: Callable[[], object]  # iteration has ended, for whatever reason
    remaining: Callable[[], int]  # how many micro-batches until the window is full
    most: Callable[[int], int] | None = None  # the most that any rank has, where each pass is a meeting of all
    repeat: Callable[[bool], None] = lambda _: None  # the next batch has been given out before, for company


class Over(Generic[Batch]):
    """A loader's batches, with the accumulator told beforehand which one is the last.

    Any iterable will do: a loader, a generator, an endless stream. `len` and the loader's own attributes (`sampler`,
    `dataset`, `set_epoch`) are forwarded where there are any.
    """

    def __init__(self, loader: Iterable[Batch], listener: Listener, counts: Callable[[Any], Any] | None) -> None:
        """Wrap a loader; nothing is read from it yet."""
        self.in_company: bool = listener.most is not None  # whether all ranks are given as many
        if counts is not None and isinstance(loader, Over):
            msg = (
                "an accumulator with counts= looks a window ahead, and would take the other's batches too early.\n"
                "Put it inside:  other.over(this.over(loader))"
            )
            raise ConfigurationError(msg)
        if self.in_company and isinstance(loader, Over) and not loader.in_company:
            msg = (
                "an accumulator of a sharded model has all ranks make as many passes, and the other, whose model is "
                "not sharded, would not hear of those that add nothing.\n"
                "Put it inside:  other.over(this.over(loader))"
            )
            raise ConfigurationError(msg)
        self._loader, self._listener, self._counts = loader, listener, counts
        self.last = False  # whether the batch given out last is the loader's last
        self.repeated = False  # whether it was given out before, for company

    def __len__(self) -> int:
        """Return the number of micro-batches, where the loader knows it."""
        if not isinstance(self._loader, Sized):
            msg = f"this loader has no length: {type(self._loader).__name__} does not define len()"
            raise TypeError(msg)
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader; private and special ones stay its own."""
        if not name.startswith("_"):
            try:
                return getattr(self._loader, name)
            except AttributeError:
                pass
            msg = f"this loader is a {type(self._loader).__name__}, which has no attribute {name!r}"
            raise AttributeError(msg, name=name, obj=self)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg, name=name, obj=self)

    def __iter__(self) -> Iterator[Batch]:
        """Give out the batches; a window left open by the end of the loader is closed."""
        announce = self._listener.announce
        self._listener.opening()
        try:
            for batch, last, totals in self._look_ahead():
                self.last = last
                announce(last, totals)
                yield batch
            self._listener.exhausted()
        finally:  # also after `break` and exceptions
            self._listener.left()

    def _look_ahead(self) -> Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]:
        if self._counts is not None:
            yield from self._window_ahead(self._counts)
        elif isinstance(self._loader, Over):  # the inner one looks ahead for both
            for batch in self._loader:
                self._repeat(self._loader.repeated)
                yield batch, self._loader.last, None
        elif self._listener.most is not None:
            yield from self._in_company(self._listener.most)
        else:
            source = iter(self._loader)
            held = list(islice(source, 1))  # one batch ahead, and no reference to those given out
            for following in source:
                yield held.pop(), False, None
                held.append(following)
            if held:
                yield held.pop(), True, None

    def _in_company(self, most: Callable[[int], int]) -> Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]:
        """Go on as long as any rank has batches; who has none left gives out the last one again, for nothing."""
        source = iter(self._loader)
        held = list(islice(source, 1))
        if not most(len(held)):
            return
        if most(int(not held)):
            msg = (
                f"{'another' if held else 'this'} rank's loader has no batch, and others have: every pass through a "
                "sharded model is a meeting of all ranks, so each needs one batch at least, which it runs again, for "
                "nothing, where others have more.\n"
                "Give every rank a share of the samples:  Subset(data, order[rank::size])\n"
                "Where there are fewer samples than ranks, start fewer ranks."
            )
            raise BatchError(msg)
        mine = more = True
        while more:
            following = list(islice(source, 1)) if mine else []
            self._repeat(not mine)
            more = most(len(following)) > 0
            yield held[0], not more, None
            mine, held = bool(following), following or held

    def _repeat(self, repeated: bool) -> None:  # noqa: FBT001 - a word to the listener
        self.repeated = repeated
        self._listener.repeat(repeated)

    def _window_ahead(self, counts: Callable[[Any], Any]) -> Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]:
        source = iter(self._loader)
        window: deque[Batch] = deque()
        while True:
            steps = self._listener.remaining()
            window.extend(islice(source, max(steps + 1 - len(window), 0)))  # one more, to know the last
            now = [window.popleft() for _ in range(min(steps, len(window)))]
            if self._listener.most is not None:
                _refuse_other_numbers(len(now), self._listener.most)
            if not now:
                return
            totals = _totals([counts(batch) for batch in now])
            now.reverse()
            while now:
                yield now.pop(), not window and not now, totals


def _refuse_other_numbers(own: int, most: Callable[[int], int]) -> None:
    """Raise on all ranks where one has fewer micro-batches than another in a window that is counted in advance."""
    largest, smallest = most(own), -most(-own)
    if largest != smallest:
        msg = (
            f"ranks have {smallest} to {largest} micro-batches in this window, {own} here, and every pass through a "
            "sharded model is a meeting of all of them.\n"
            "With counts=, give every rank as many batches (DistributedSampler(..., drop_last=True)) and steps."
        )
        raise BatchError(msg)


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
            totals.append(sum((number for _, number in checked[1:]), start=checked[0][1]))
    return tuple(totals)

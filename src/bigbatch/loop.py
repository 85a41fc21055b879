"""A loader whose last batch is known: by its length, or by looking ahead one batch; a window, to count it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MappingView, Sized
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from bigbatch.batch.tree import digest
from bigbatch.errors import BatchError, ConfigurationError, WindowError
from bigbatch.loss.count import Count, TotalOfSum, checked_count, finite

Batch = TypeVar("Batch")
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
    asked: int = 0  # how often anyone had asked for other micro-batches when it was given out
    promised: bool = True  # whether other ranks expect a window of it: those that begin expect one at least

    def refuse_second(self) -> None:
        """Refuse another loss of a batch that was given out once."""
        if self.spent:
            raise WindowError(
                "backward was called a second time for one batch of `over`: a batch is one micro-batch of the window.",
                fix="accumulator.backward(loss_real + loss_fake), once",
            )


def no_loop() -> Loop:
    """Stand for a loop that is written by hand; it promises nothing."""
    return Loop(of_over=False, spent=False, promised=False)


@dataclass(frozen=True)
class Listener:
    """What an `Over` tells the accumulator that made it, and asks of it."""

    opening: Callable[[], Loop]  # iteration begins
    announce: Callable[[Loop, bool, tuple[Count, ...] | None], None]  # the next batch is the last; its window's totals
    exhausted: Callable[[Loop], object]  # all batches were given out
    left: Callable[[Loop], object]  # iteration has ended before, by `break` or an error
    remaining: Callable[[], int]  # how many micro-batches until the window is full
    kept: "list[Source[Any]]"  # what was read ahead of an iterator that a loop was left with
    most: Callable[[int], int] | None = None  # the most that any rank has, where each pass is a meeting of all
    must_know: bool = False  # whether the last batch must be known before it is used


class Source(Generic[Batch]):
    """The batches of a loader, in turn. It reads ahead only what it must, and loses none."""

    def __init__(self, loader: Iterable[Batch], *, must_know: bool) -> None:
        """Begin; a loader with a state of its own is not read ahead, unless one `must_know` what comes."""
        self.iterator = iter(loader)
        self.held: deque[Batch] = deque()
        self._length, self._read = _trusted_length(loader), 0
        wrapped = (loader, getattr(loader, "dataset", None), getattr(loader, "iterable", None))  # the latter by tqdm
        self._must_know, self._looks_ahead = must_know, must_know or not any(hasattr(w, "state_dict") for w in wrapped)
        self._compared = 1  # so many, held together, were seen not to be written over
        self._ended = False
        self._failure: Exception | None = None  # of reading ahead; the batches before it come first

    def look(self, number: int) -> int:
        """Read on until so many are held, or the end; returns how many are."""
        before = [digest(batch) for batch in self.held] if number > self._compared else None
        if before and None in before and not self._must_know:  # nobody could tell if it were written over
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

    def __iter__(self) -> Iterator[tuple[Batch, bool, None]]:
        """Give out the batches, each with whether it is the last, as far as that is known."""
        length = self._length
        # On the shortest way: small models feel it.
        for number, batch in enumerate(self.iterator if length is not None else (), 1):
            if length is not None and number > length:
                raise BatchError(_TOO_MANY.format(length))
            yield batch, number == length, None
        while length is None and self.look(1):
            last = self.is_last()
            yield self.held.popleft(), last, None

    def is_last(self) -> bool:
        """Tell whether no other comes after the next batch, as far as that is known."""
        if len(self.held) == 1 and self._length is not None and not self._ended:
            return self._read == self._length
        if self._looks_ahead:
            self.look(2)
        return self._ended and len(self.held) == 1


class Over(Generic[Batch]):
    """A loader's batches, with the accumulator told beforehand which one is the last.

    Any iterable will do: a loader, a generator, an endless stream. `len` and the loader's own attributes (`sampler`,
    `dataset`, `set_epoch`) are forwarded where there are any.
    """

    def __init__(self, loader: Iterable[Batch], listener: Listener, counts: Callable[[Any], Any] | None) -> None:
        """Wrap a loader; nothing is read from it yet."""
        self.in_company: bool = listener.most is not None  # whether all ranks are given as many
        if isinstance(loader, Over) and (counts is not None or (self.in_company and not loader.in_company)):
            raise ConfigurationError(
                "an accumulator with counts= looks a window ahead, and one of a sharded model repeats batches, which "
                "the other would not hear of.",
                fix="this one inside:  other.over(this.over(loader))",
            )
        self._loader, self._listener, self._counts = loader, listener, counts
        self.loop: Loop = no_loop()  # the latest

    def __len__(self) -> int:
        """Return the number of micro-batches, where the loader knows it."""
        loader: Any = self._loader
        return len(loader)

    def __bool__(self) -> bool:
        """Tell whether there are batches, as far as the loader knows."""
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
        listener, loader = self._listener, self._loader
        loop, announce, source = listener.opening(), listener.announce, None
        self.loop = loop
        try:
            source = None if isinstance(loader, Over) else self._source()
            for batch, last, totals in self._in_turn(loop, source):
                try:
                    announce(loop, last, totals)
                except BaseException:  # it is not given out: an iterator would not give it again
                    if source is not None and source.iterator is loader and not loop.repeated:
                        source.held.appendleft(batch)
                    raise
                yield batch
            listener.exhausted(loop)  # nothing comes after it: an error would not tell of its update
        except BaseException:  # also GeneratorExit, of `break`
            listener.left(loop)
            raise
        finally:
            if source is not None and not (source.iterator is loader and source.held):
                listener.kept.remove(source)

    def _source(self) -> Source[Batch]:
        """Return what was read ahead of this loader before, where a loop was left, or begin."""
        kept = self._listener.kept
        source = next((each for each in kept if each.iterator is self._loader), None)
        if source is None:
            source = Source(self._loader, must_know=self._listener.must_know or self._counts is not None)
            kept.append(source)
        return source

    def _in_turn(
        self, loop: Loop, source: Source[Batch] | None
    ) -> Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]:
        if source is None:
            return self._of_inner(loop)
        if self._counts is not None:
            return self._window_ahead(source, self._counts)
        if self._listener.most is not None:
            return self._in_company(source, self._listener.most, loop)
        return iter(source)

    def _of_inner(self, loop: Loop) -> Iterator[tuple[Batch, bool, None]]:
        """Go through the batches of another `over`, which knows the last one for both."""
        inner: Any = self._loader
        for batch in inner:
            loop.repeated = inner.loop.repeated
            yield batch, inner.loop.last, None

    def _in_company(
        self, source: Source[Batch], most: Callable[[int], int], loop: Loop
    ) -> Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]:
        """Go on as long as any rank has batches; who has none left gives out the last one again, for nothing."""
        if not _number_of_all(int(source.look(1) > 0), most):
            return
        batch, last, more = source.held[0], source.is_last(), True
        while more:
            more = most(int(not last)) > 0
            if not loop.repeated:
                batch = source.held.popleft()
            yield batch, not more, None
            loop.repeated = not source.look(1)
            last = loop.repeated or source.is_last()

    def _window_ahead(
        self, source: Source[Batch], counts: Callable[[Any], Any]
    ) -> Iterator[tuple[Batch, bool, tuple[Count, ...] | None]]:
        while True:
            steps = self._listener.remaining()
            number = min(source.look(steps), steps)
            if self._listener.most is not None:
                _number_of_all(number, self._listener.most)
            if not number:
                return
            totals = _totals([counts(batch) for batch in islice(source.held, number)])
            for left in reversed(range(number)):
                last = not left and source.is_last()
                yield source.held.popleft(), last, totals


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

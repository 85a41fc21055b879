"""Choose the size of micro-batches: a few probes, a fit of the peak against the size, a choice that was measured.

The peak of a micro-step is a maximum over its moments, and what is alive at each grows in proportion to the samples,
so the peak is convex and piecewise linear in the size. That makes guesses safe on one side: a line through two
measured sizes, drawn further, is never above the peak, so no size fits beyond where that line leaves the budget;
and all that lies below a size that fits, fits.

Time is no such line: past the point where a device is busy, larger is not faster, and may be slower. So what counts is
the measured time of the whole batch, cut into as many micro-batches as the size makes of it.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigbatch.batch.split import balanced
from bigbatch.errors import OutOfMemory, SeveralCounts
from bigbatch.memory.budget import human

MARGIN = 0.03  # of the budget, left free: an allocator's holes, and what a step holds that a probe does not
PROBES = 6
HALVINGS = 4  # more, where a size ran out of memory: that says one thing, too large, and a peak says how much
TIE = 1.02  # as fast as makes no difference
_SLOWER = 1.05  # than the fastest that may still fit: worth another probe
_FURTHEST = 64  # times the largest size that fits: a line through two small sizes says little further out


@dataclass(frozen=True)
class Probe:
    """What a micro-step of this many samples took."""

    size: int
    peak_bytes: int | None  # None: it ran out of memory
    seconds: float | None = None  # None: it was not timed

    def fits(self, limit: int) -> bool:
        """Whether its peak was seen to stay inside a limit."""
        return self.peak_bytes is not None and self.peak_bytes <= limit


@dataclass(frozen=True)
class Choice:
    """The size to take, and all that was seen on the way; probes are in the order of their sizes."""

    size: int
    largest: int  # samples in the batch
    probes: tuple[Probe, ...]
    limit: int  # the budget less its margin: what a peak may be

    @property
    def steps(self) -> int:
        """Micro-batches of this size in the batch."""
        return -(-self.largest // self.size)

    @property
    def fits_whole(self) -> bool:
        """Whether the whole batch was seen to fit, so that size is a matter of speed."""
        return any(p.size == self.largest and p.fits(self.limit) for p in self.probes)

    @property
    def peak_bytes(self) -> int:
        """The peak measured at this size."""
        return next(p.peak_bytes for p in self.probes if p.size == self.size and p.peak_bytes is not None)

    def seconds(self, size: int) -> float | None:
        """The time of the whole batch in micro-batches of this size, as the probes tell it."""
        return batch_seconds(size, self.largest, self.probes)


def choose(probe: Callable[[int], Probe], largest: int, budget: int, *, margin: float = MARGIN) -> Choice:
    """Find the size whose micro-batches are through the batch first, and whose peak stays inside the budget.

    Sizes within 2 % of the fastest count as equally fast; of those, one that cuts the batch into equal parts is taken
    before one that does not, then the smallest. The size that is returned was probed. There are six probes, and up to
    four more where memory ran out and the sizes left differ by 5 % in speed.

    Args:
        probe: runs one micro-step of so many samples. Running out of memory is an answer, not an error.
        largest: samples in the batch.
        budget: bytes that the peak must stay inside, margin included.
        margin: the part of the budget to leave free.
    """
    search = _Search(probe, largest, int(budget * (1 - margin)))
    try:
        first = search.look(1)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        # Some programs cannot run one sample alone, as those that squeeze the model's output.
        if largest == 1 or isinstance(error, SeveralCounts | OutOfMemory):
            raise
        first = search.look(2)
    if not first.fits(search.limit):
        found, peak = f"ran out of memory; the budget is {human(budget)}", first.peak_bytes
        if peak is not None:
            found = (
                f"needs {human(peak)}, {human(peak - search.limit)} more than the {human(search.limit)} that a budget "
                f"of {human(budget)} leaves after its margin"
            )
        raise OutOfMemory(
            f"one sample does not fit: its forward and backward, with weights, gradients and optimizer state, {found}.",
            fix="torch.utils.checkpoint around each block, shorter sequences or smaller images, bfloat16 autocast, or "
            "LoRA",
        )
    while (size := search.next_towards_the_largest()) is not None:
        search.look(size)
    search.look_for_a_faster_one()
    return Choice(search.best().size, largest, tuple(search.seen), search.limit)


class _Search:
    """The probes made so far, and which to make next."""

    def __init__(self, probe: Callable[[int], Probe], largest: int, limit: int) -> None:
        self.limit, self._probe, self._largest = limit, probe, largest
        self._left, self._more = PROBES, HALVINGS
        self._seen: dict[int, Probe] = {}

    @property
    def seen(self) -> list[Probe]:
        return [self._seen[size] for size in sorted(self._seen)]

    def next_towards_the_largest(self) -> int | None:
        """Close in on the boundary from both sides, until the sizes between make no difference."""
        low, high = self._fitting[-1], next((p for p in self.seen if not p.fits(self.limit)), None)
        between = even_sizes(self._largest, low.size, self._largest + 1 if high is None else high.size)
        # A line through two peaks, drawn further, is never above the peak: where it is over the limit, nothing fits.
        over = [p for p in self.seen if p.peak_bytes is not None and p.peak_bytes > self.limit][:2]
        bound = min(_crossing(self._fitting[-2:], self.limit), _crossing(over, self.limit))
        between = [size for size in between if size <= bound]
        if not between or self._parts(low.size) <= TIE * self._parts(between[-1]):
            return None
        if not self._left:  # more are spent where some have failed, and the largest that may still fit would be faster
            failed, time = any(p.peak_bytes is None for p in self.seen), self._seconds if self._timed else self._parts
            if not (self._more > 0 and failed and time(low.size) > _SLOWER * time(between[-1])):
                return None
        wanted: float = between[len(between) // 2]  # few sizes are large, so this is well below where memory ran out
        if high is None:
            wanted = low.size * _FURTHEST
        elif bound < high.size and (high.peak_bytes is None or len(over) > 1):
            wanted = bound
        elif high.peak_bytes is not None:
            # A chord is never below the peaks between, so where it leaves the budget still fits. Where that is close to
            # `low`, a second peak over the limit tells more: the line through both leads back to where they leave it.
            chord = _crossing([low, high], self.limit)
            wanted = chord if chord >= wanted else between[-1]
        return max((size for size in between if size <= wanted), default=between[0])

    def look_for_a_faster_one(self) -> None:
        """Where a size below the largest was the fastest, the very fastest may lie beside it."""
        while self._left > 1 and self._timed:
            sizes = [p.size for p in self._fitting]
            place = sizes.index(min(sizes, key=self._seconds))
            gaps = [(sizes[i], sizes[i + 1]) for i in (place - 1, place) if 0 <= i < len(sizes) - 1]
            if place == len(sizes) - 1 or not gaps:
                return
            low, high = max(gaps, key=lambda gap: gap[1] / gap[0])
            between = even_sizes(self._largest, low, high)
            if high <= 2 * low or not between:
                return
            self.look(min(between, key=lambda size: abs(math.log(size * size / (low * high)))))

    def best(self) -> Probe:
        """The probe to take: it fits, and was measured."""
        if not self._timed:
            return self._fitting[-1]
        fast_enough = TIE * min(self._seconds(p.size) for p in self._fitting)
        as_fast = [p for p in self._fitting if self._seconds(p.size) <= fast_enough]
        return min(as_fast, key=lambda p: (self._largest % p.size != 0, p.size))

    @property
    def _fitting(self) -> list[Probe]:
        return [p for p in self.seen if p.fits(self.limit)]

    @property
    def _timed(self) -> bool:
        return all(p.seconds is not None for p in self._fitting)

    def look(self, size: int) -> Probe:
        self._left, self._more = (self._left - 1, self._more) if self._left else (0, self._more - 1)
        return self._seen.setdefault(size, self._probe(size))

    def _parts(self, size: int) -> int:
        return -(-self._largest // size)

    def _seconds(self, size: int) -> float:
        return batch_seconds(size, self._largest, self._fitting) or 0.0


def even_sizes(total: int, above: int, below: int) -> list[int]:
    """Return, ascending, the sizes between two others that cut the batch into parts which differ by at most one."""
    root = math.isqrt(total) + 1  # of size and number of parts, one is at most this
    parts = {*range(1, root + 1), *(-(-total // size) for size in range(1, root + 1))}
    return sorted(size for size in {-(-total // each) for each in parts} if above < size < below)


def batch_seconds(size: int, total: int, probes: Sequence[Probe]) -> float | None:
    """Return the time of a batch in micro-batches of a size: lines through the times that were measured."""
    times = [(p.size, p.seconds) for p in probes if p.seconds is not None and p.peak_bytes is not None]
    if len(times) < 2:  # noqa: PLR2004 - of one there is no line
        return times[0][1] * -(-total // size) if times else None

    def line(at: int) -> float:  # through the two points around a place, or the two nearest to it
        place = min(max(bisect_right(times, at, key=lambda point: point[0]), 1), len(times) - 1)
        (x, y), (u, v) = times[place - 1 : place + 1]
        return y + (v - y) * (at - x) / (u - x)

    return sum(number * line(each) for each, number in Counter(balanced(total, size)).items())


def _crossing(probes: Sequence[Probe], limit: int) -> float:
    """Return where the line through two peaks reaches the limit."""
    if len(probes) < 2:  # noqa: PLR2004 - of one there is no line
        return math.inf
    (x, y), (u, v) = ((p.size, p.peak_bytes or 0) for p in probes)
    return math.inf if v <= y else x + (limit - y) * (u - x) / (v - y)

"""The choice of a size: inside the budget, as fast as the best, in few probes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigbatch.batch.split import balanced
from bigbatch.errors import OutOfMemory
from bigbatch.memory.search import HALVINGS, MARGIN, PROBES, Probe, choose, even_sizes
from tests.support.messages import approve

GIB = 1 << 30


@dataclass
class Device:
    """A device with a peak and a time for every size; it runs out of memory above its capacity."""

    phases: Sequence[tuple[int, int]]  # bytes before the first sample and bytes per sample, of every moment of a step
    time: Callable[[int], float]
    capacity: float = math.inf
    asked: list[int] = field(default_factory=list)

    def peak(self, size: int) -> int:
        """A maximum of lines: convex and piecewise linear."""
        return max(base + per_sample * size for base, per_sample in self.phases)

    def probe(self, size: int) -> Probe:
        """One micro-step, as the library makes it."""
        self.asked.append(size)
        peak = self.peak(size)
        return Probe(size, None, None) if peak > self.capacity else Probe(size, peak, self.time(size))

    def batch_seconds(self, size: int, total: int) -> float:
        """What a batch really takes."""
        return sum(map(self.time, balanced(total, size)))


def saturating(launch: float, busy: float) -> Callable[[int], float]:
    """The time of a device that is idle while kernels are launched, and busy from some size on."""
    return lambda size: max(launch, busy * size) + 0.1 * launch


def affine(launch: float, busy: float) -> Callable[[int], float]:
    """A fixed cost and a cost per sample."""
    return lambda size: launch + busy * size


seconds = st.floats(1e-5, 1.0), st.floats(1e-5, 1e-1)
times = st.builds(affine, *seconds) | st.builds(saturating, *seconds)


@st.composite
def devices(draw: st.DrawFn) -> tuple[Device, int, int]:
    """Return a device, a batch and a budget that one sample at least fits into."""
    weights = draw(st.integers(0, 20 * GIB))
    # The moments of a step: with the optimizer's temporaries, at the end of the forward, at the largest layer.
    moments = st.tuples(st.integers(0, 2 * GIB), st.integers(0, 4 * GIB))
    phases = [(weights + base, each) for base, each in draw(st.lists(moments, min_size=1, max_size=3))]
    device = Device(phases, draw(times))
    batch = draw(st.integers(1, 5000))
    needed = device.peak(1) / (1 - MARGIN) + 2
    budget = int(needed + draw(st.floats(0, 1)) ** 3 * (1.2 * device.peak(batch) + GIB))
    device.capacity = draw(st.sampled_from([math.inf, budget, 1.3 * budget]))
    return device, batch, budget


def fastest(device: Device, batch: int, limit: int) -> float:
    """Try all sizes that fit."""
    fitting = [size for size in even_sizes(batch, 0, batch + 1) if device.peak(size) <= limit]
    return min(device.batch_seconds(size, batch) for size in fitting)


# A budget just above a floor that does not depend on samples: chords and small probes say nearly nothing there.
@example((Device([(0, 57592), (2351020, 0)], affine(1.0, 0.0625)), 41, 2423733))
@example((Device([(0, 3552), (46178, 0)], affine(1.0, 0.0625)), 103, 47608))
@example((Device([(0, 3772), (444741, 0)], affine(1.0, 0.0625)), 118, 458497))
@example((Device([(0, 634), (4755, 0)], affine(1.0, 0.0625), 4904), 29, 4904))
@example((Device([(0, 1056176), (17416279, 0)], affine(1.0, 0.0625), 17954928), 81, 17954928))
@given(devices())
def test_inside_the_budget_and_as_fast_as_the_best(case: tuple[Device, int, int]) -> None:
    """Never over the budget, at least 95 % of the best throughput of all that fits, in six probes if none fails."""
    device, batch, budget = case
    choice = choose(device.probe, batch, budget)
    assert 1 <= choice.size <= batch
    assert device.peak(choice.size) <= (1 - MARGIN) * budget
    failed = any(probe.peak_bytes is None for probe in choice.probes)
    assert len(device.asked) == len(set(device.asked)) <= PROBES + HALVINGS * failed
    assert device.asked == sorted(device.asked) or max(device.asked) >= choice.size
    assert choice.size in device.asked
    assert device.batch_seconds(choice.size, batch) <= fastest(device, batch, choice.limit) / 0.95


@given(devices(), st.lists(st.floats(0.5, 2.0), min_size=20, max_size=20))
@settings(max_examples=50)
def test_never_over_the_budget_whatever_the_times(case: tuple[Device, int, int], noise: list[float]) -> None:
    """Times that jump about change the choice, never its safety."""
    device, batch, budget = case
    steady, times = device.time, iter(noise)
    device.time = lambda size: steady(size) * next(times)
    choice = choose(device.probe, batch, budget)
    assert device.peak(choice.size) <= choice.limit <= (1 - MARGIN) * budget
    assert len(device.asked) <= PROBES + HALVINGS


@given(devices())
@settings(max_examples=50)
def test_without_times_the_largest_that_fits(case: tuple[Device, int, int]) -> None:
    """A trace has no times: then fewer steps are better."""
    device, batch, budget = case
    choice = choose(lambda size: Probe(size, device.probe(size).peak_bytes), batch, budget)
    assert choice.size == max(probe.size for probe in choice.probes if probe.fits(choice.limit))


def test_past_saturation_less_memory_is_taken() -> None:
    """At the same speed, the smaller size; it divides the batch. Where larger is faster and all fits, all at once."""
    choice = choose(Device([(GIB, 1 << 20)], affine(1.0, 0.001)).probe, 64, 40 * GIB)
    assert (choice.size, choice.steps, choice.fits_whole) == (64, 1, True)
    choice = choose(Device([(GIB, GIB)], saturating(1e-6, 1e-3)).probe, 1024, 200 * GIB)
    assert choice.size < 32
    assert 1024 % choice.size == 0


def test_larger_may_be_slower() -> None:
    """A size in the middle that is the fastest is found."""
    device = Device([(0, 1)], lambda size: 0.05 + 0.001 * size + 0.00002 * size * size)
    choice = choose(device.probe, 4096, 1 << 40)
    best = min(device.batch_seconds(size, 4096) for size in range(1, 4097))
    assert device.batch_seconds(choice.size, 4096) <= 1.05 * best


@pytest.mark.parametrize("capacity", [math.inf, GIB])
def test_one_sample_that_does_not_fit_is_refused_with_numbers(capacity: float) -> None:
    """The error says how much is missing and what to try."""
    device = Device([(2 * GIB, GIB)], affine(1.0, 0.1), capacity)
    with pytest.raises(OutOfMemory) as caught:
        choose(device.probe, 64, 2 * GIB)
    approve("memory", f"one sample on a device of {capacity}", caught.value)

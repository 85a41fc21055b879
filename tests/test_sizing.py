"""The choice of a size: inside the budget, as fast as the best, in few probes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigbatch.errors import ConfigurationError
from bigbatch.sizing import MARGIN, PROBES, Choice, DoesNotFit, Probe, choose, even_sizes
from bigbatch.splitting import balanced

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


times = st.one_of(
    st.builds(affine, st.floats(1e-5, 1.0), st.floats(1e-5, 1e-1)),
    st.builds(saturating, st.floats(1e-5, 1.0), st.floats(1e-5, 1e-1)),
)


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


@given(devices())
def test_inside_the_budget_and_as_fast_as_the_best(case: tuple[Device, int, int]) -> None:
    """Never over the budget, at least 95 % of the best throughput of all that fits, in six probes at most."""
    device, batch, budget = case
    choice = choose(device.probe, batch, budget)
    assert 1 <= choice.size <= batch
    assert device.peak(choice.size) <= (1 - MARGIN) * budget
    assert len(device.asked) == len(set(device.asked)) <= PROBES
    assert device.asked == sorted(device.asked) or max(device.asked) >= choice.size
    assert choice.size in device.asked
    assert device.batch_seconds(choice.size, batch) <= fastest(device, batch, choice.limit) / 0.95

"""Rounding, measured: how far apart two runs of the same big batch lie, so that no more is taken for a mistake."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from bigbatch.verifying.gradients import Gradients, overall, relative
from bigbatch.verifying.runs import Runs, Whole
from bigbatch.verifying.trying import tried
from bigbatch.verifying.verification import EXACT

_THIRD = 1 / 3  # a factor that no dtype holds exactly: every product is rounded anew
_SEVENTH = 1 / 7
_AS_ROUNDING = 30  # times the rounding of a factor: another order of the samples costs no more, if it is rounding
_FEW = 16
_LOOSE = 1e-9
_PLAIN = 0.05  # no rounding, whatever the dtype
_MOST = 1e-6  # of a gradient in float64: no rounding either


@dataclass(frozen=True)
class Judge:
    """What rounding explains, for each parameter."""

    floors: Mapping[str, float]
    precise: bool  # the model computed all in the dtype that it ran in
    most: float = math.inf  # what no rounding exceeds

    @property
    def bent(self) -> float:
        """How far scaling the loss moves the big batch's gradient, where that is no rounding; else 0."""
        largest = max(self.floors.values(), default=0.0)
        return largest if largest > self.most else 0.0

    @property
    def floor(self) -> float:
        """The typical rounding."""
        return median(self.floors.values()) if self.floors else 0.0

    @property
    def loose(self) -> float:
        """What is no rounding any more in any experiment."""
        return max(_LOOSE, _FEW * self.floor)

    def gone(self, differences: Mapping[str, float]) -> bool:
        """Whether a difference went away, in an experiment whose own rounding was not measured."""
        return all(each <= max(self.loose, _FEW * self.floors.get(name, 0.0)) for name, each in differences.items())


def measured(runs: Runs, truth: Whole) -> Judge:
    """Run the big batch again, once scaled and once in another order as well."""
    scaled = relative(runs.whole(factor=_THIRD).gradients, truth.gradients)
    number = runs.samples.number
    order = [*range(1, number, 2), *range(0, number, 2)][::-1]
    # A loss may want its samples in order.
    moved = tried(lambda: relative(runs.whole(order=order, factor=_SEVENTH).gradients, truth.gradients), scaled)
    # Masks of a dropout fall on other samples, and neighbours are others: that is no rounding.
    counts = overall(moved) <= max(_LOOSE, _AS_ROUNDING * overall(scaled))
    floors = {name: max(each, moved[name]) if counts else each for name, each in scaled.items()}
    finite = {name: each for name, each in floors.items() if math.isfinite(each)}
    typical = median(finite.values()) if finite else 0.0
    # By chance one parameter's two roundings may be the same.
    most = _MOST if truth.precise and runs.judged_in == torch.float64 else _PLAIN
    return Judge({name: max(finite.get(name, typical), typical) for name in floors}, truth.precise, most)


@dataclass(frozen=True)
class Compared:
    """One big batch and one window, side by side."""

    truth: Gradients
    found: Gradients
    differences: Mapping[str, float]

    @classmethod
    def of(cls, found: Gradients, truth: Gradients) -> "Compared":
        """Measure the differences."""
        return cls(truth, found, relative(found, truth))

    @property
    def overall(self) -> float:
        """One figure for all parameters."""
        return overall(self.differences)


def repeats(runs: Runs, truth: Whole, judge: Judge) -> float:
    """Return how far a second run of the same big batch lies from the first, where that is no rounding; else 0."""
    small = EXACT if judge.precise and runs.judged_in == torch.float64 else low(runs)
    if max(judge.floors.values(), default=0.0) <= small:
        return 0.0
    apart = max(relative(runs.whole().gradients, truth.gradients).values(), default=0.0)
    return apart if apart > small else 0.0


def low(runs: Runs) -> float:
    """Return what kernels that add up in any order may differ by, where some of it runs in less than float64."""
    dtype = torch.float32 if runs.judged_in == torch.float64 else runs.judged_in
    return min(1000 * torch.finfo(dtype).eps, _PLAIN)

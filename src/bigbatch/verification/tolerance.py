"""Gradients by name, how far two of them differ, and how much of that is rounding."""

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn

Gradients: TypeAlias = Mapping[str, Tensor]  # in float64; zero where a parameter got none

EXACT = 1e-12  # relative, in float64: what counts as equal whatever the rounding
FAR = 30  # times a measured rounding: no rounding any more
_PRECISE = 1e-10  # relative: a model whose rounding is larger computes some of it in less than float64
_LOOSE = 1e-9
_FACTOR = 16  # times the measured rounding, in experiments whose own rounding is not measured
# A gradient that is zero but for rounding, as of a bias before a softmax, has no size of its own to be relative to.
_SMALL = 1e-2  # of the typical size of an element


def read_gradients(parameters: Mapping[str, nn.Parameter], factor: float = 1.0) -> dict[str, Tensor]:
    """Copy the gradients of some parameters, dense and in float64, times a factor."""
    found = {}
    for name, p in parameters.items():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
        found[name] = dense.to(torch.float64, copy=True) * factor
    return found


def add(gradients: Iterable[Gradients]) -> dict[str, Tensor]:
    """Add several up; of some, parameters may be missing."""
    found: dict[str, Tensor] = {}
    for name, gradient in (item for each in gradients for item in each.items()):
        found[name] = found[name] + gradient if name in found else gradient
    return found


def is_zero(gradients: Gradients) -> bool:
    """Whether there is no gradient."""
    return not any(bool(g.any()) for g in gradients.values())


def relative(found: Gradients, truth: Gradients) -> dict[str, float]:
    """Return how far each gradient is from the true one, relative to the size of that one."""
    sizes = {name: float(gradient.norm()) for name, gradient in truth.items()}
    number = sum(gradient.numel() for gradient in truth.values())
    typical = math.sqrt(math.fsum(size**2 for size in sizes.values()) / max(number, 1))
    differences = {}
    for name, gradient in truth.items():
        apart = float((found[name] - gradient).norm())
        size = max(sizes[name], _SMALL * typical * math.sqrt(gradient.numel()))
        differences[name] = 0.0 if apart == 0 else apart / size if size and math.isfinite(apart) else math.inf
    return differences


def overall(differences: Mapping[str, float]) -> float:
    """Return one figure for all parameters, each of which counts the same: the root of their mean square."""
    return math.sqrt(math.fsum(each**2 for each in differences.values()) / max(len(differences), 1))


class Comparison:
    """A window's gradients, the big batch's, and how far they differ."""

    def __init__(self, found: Gradients, truth: Gradients) -> None:
        """Measure the differences."""
        self.found, self.truth, self.differences = found, truth, relative(found, truth)
        self.overall = overall(self.differences)


class Tolerance:
    """What rounding explains, for each parameter."""

    def __init__(self, measured: Mapping[str, float], most: float) -> None:
        """Even out what was measured: by chance two roundings of a parameter may be the same."""
        finite = {name: min(each, most) for name, each in measured.items() if math.isfinite(each)}
        typical = median(finite.values()) if finite else 0.0
        self.floors = {name: max(finite.get(name, typical), typical) for name in measured}
        self.is_precise = overall(self.floors) <= _PRECISE  # all of the model computes in float64
        self.nonlinear = self.repeated = 0.0  # how far twice the loss, and a second run, are from the first
        self.loose = max(_LOOSE, _FACTOR * median(self.floors.values()))  # more than rounding in any experiment

    def is_negligible(self, differences: Mapping[str, float]) -> bool:
        """Whether a difference is rounding, in an experiment whose own rounding was not measured."""
        return all(each <= max(self.loose, _FACTOR * self.floors.get(name, 0.0)) for name, each in differences.items())

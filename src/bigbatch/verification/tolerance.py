"""Gradients by name, how far two of them differ, and how much of that is rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn

Gradients: TypeAlias = Mapping[str, Tensor | None]  # in float64; None where a parameter got none

EXACT = 1e-12  # relative, in float64: what counts as equal whatever the rounding
_PRECISE = 1e-10  # relative: a model whose rounding is larger computes some of it in less than float64
_LOOSE = 1e-9
_FACTOR = 16  # times the measured rounding, in experiments whose own rounding is not measured
# A gradient that is zero but for rounding, as of a bias before a softmax, has no size of its own to be relative to.
_SMALL = 1e-2  # of the typical size of an element


def read_gradients(parameters: Mapping[str, nn.Parameter], factor: float = 1.0) -> dict[str, Tensor | None]:
    """Copy the gradients of some parameters, in float64."""
    return {name: in_float64(p.grad, factor) for name, p in parameters.items()}


def in_float64(gradient: Tensor | None, factor: float = 1.0) -> Tensor | None:
    """Return a dense copy in float64, times a factor."""
    if gradient is None:
        return None
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return dense.to(torch.float64, copy=True) * factor


def add(gradients: Sequence[Gradients]) -> dict[str, Tensor | None]:
    """Add several up."""
    found: dict[str, Tensor | None] = {}
    for each in gradients:
        for name, gradient in each.items():
            before = found.get(name)
            found[name] = gradient if before is None else before if gradient is None else before + gradient
    return found


def is_finite(gradients: Gradients) -> bool:
    """Whether no element is inf or NaN."""
    return all(bool(torch.isfinite(g).all()) for g in gradients.values() if g is not None)


def relative(found: Gradients, truth: Gradients) -> dict[str, float]:
    """Return how far each gradient is from the true one, relative to the size of that one."""
    sizes = {name: _norm(gradient) for name, gradient in truth.items()}
    number = sum(g.numel() for g in truth.values() if g is not None)
    typical = math.sqrt(math.fsum(size**2 for size in sizes.values()) / max(number, 1))
    differences = {}
    for name, gradient in truth.items():
        other = found.get(name)
        apart = _norm(other if gradient is None else gradient if other is None else other - gradient)
        elements = 0 if gradient is None else gradient.numel()
        size = max(sizes[name], _SMALL * typical * math.sqrt(elements))
        differences[name] = 0.0 if apart == 0 else apart / size if size and math.isfinite(apart) else math.inf
    return differences


def overall(differences: Mapping[str, float]) -> float:
    """Return one figure for all parameters, each of which counts the same: the root of their mean square."""
    return math.sqrt(math.fsum(each**2 for each in differences.values()) / max(len(differences), 1))


def largest(differences: Mapping[str, float]) -> float:
    """Return the largest difference of a parameter."""
    return max(differences.values(), default=0.0)


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient))


@dataclass(frozen=True)
class Comparison:
    """A window's gradients, the big batch's, and how far they differ."""

    found: Gradients
    truth: Gradients
    differences: Mapping[str, float]

    @classmethod
    def of(cls, found: Gradients, truth: Gradients) -> "Comparison":
        """Measure the differences."""
        return cls(found, truth, relative(found, truth))

    @property
    def overall(self) -> float:
        """One figure for all parameters."""
        return overall(self.differences)


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains, for each parameter."""

    floors: Mapping[str, float]

    @classmethod
    def of(cls, measured: Mapping[str, float], most: float) -> "Tolerance":
        """Even out what was measured: by chance two roundings of a parameter may be the same."""
        finite = {name: min(each, most) for name, each in measured.items() if math.isfinite(each)}
        typical = median(finite.values()) if finite else 0.0
        return cls({name: max(finite.get(name, typical), typical) for name in measured})

    @property
    def is_precise(self) -> bool:
        """Whether all of the model computes in float64."""
        return overall(self.floors) <= _PRECISE

    @property
    def loose(self) -> float:
        """What is more than rounding in any experiment."""
        return max(_LOOSE, _FACTOR * (median(self.floors.values()) if self.floors else 0.0))

    def is_negligible(self, differences: Mapping[str, float]) -> bool:
        """Whether a difference is rounding, in an experiment whose own rounding was not measured."""
        return all(each <= max(self.loose, _FACTOR * self.floors.get(name, 0.0)) for name, each in differences.items())

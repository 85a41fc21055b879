"""Gradients by the names of their parameters, and how far two of them lie apart."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Gradients: TypeAlias = Mapping[str, Tensor | None]  # in float64; None where a parameter got none

# A gradient that is zero but for rounding, as of a bias before a softmax, has no size of its own to be relative to.
_SMALL = 1e-2  # of the typical size of an element


def taken(parameters: Mapping[str, nn.Parameter], factor: float = 1.0) -> dict[str, Tensor | None]:
    """Copy the gradients of some parameters, in float64."""
    return {name: wide(p.grad, factor) for name, p in parameters.items()}


def wide(gradient: Tensor | None, factor: float = 1.0) -> Tensor | None:
    """Return a copy in float64, dense, times a factor."""
    if gradient is None:
        return None
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return dense.to(torch.float64, copy=True) * factor


def added(gradients: Sequence[Gradients]) -> dict[str, Tensor | None]:
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
    """Return how far each gradient lies from the true one, relative to that one's size."""
    sizes = {name: _norm(gradient) for name, gradient in truth.items()}
    number = sum(g.numel() for g in truth.values() if g is not None)
    typical = math.sqrt(math.fsum(size**2 for size in sizes.values()) / max(number, 1))
    return {
        name: _ratio(
            _apart(found.get(name), gradient), max(sizes[name], _SMALL * typical * math.sqrt(_number(gradient)))
        )
        for name, gradient in truth.items()
    }


def overall(differences: Mapping[str, float] | Iterable[float]) -> float:
    """Return one figure for the differences of all parameters, each of which counts the same: their mean square."""
    values = list(differences.values()) if isinstance(differences, Mapping) else list(differences)
    return math.sqrt(math.fsum(value**2 for value in values) / len(values)) if values else 0.0


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return _norm(one if other is None else other)
    return _norm(one - other)


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient))


def _number(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient.numel()


def _ratio(apart: float, size: float) -> float:
    if not math.isfinite(apart):
        return math.inf
    return 0.0 if apart == 0 else math.inf if size == 0 else apart / size

"""By which weights micro-batches were added up: read from the gradients, whoever added them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CLEARLY = 0.01
_DEPENDENT = 1e-6  # of the largest singular value: below it weights cannot be told apart


@dataclass(frozen=True)
class Fit:
    """A gradient as a weighted sum of the micro-batches' own, and of a term of parameters alone."""

    weights: tuple[float, ...]
    alone: float  # the weight of the term of parameters alone
    residual: float  # of the gradient, relatively: what no weights explain

    def is_mean(self) -> bool:
        """Whether these can be the weights of a mean: shares of one whole."""
        return min(self.weights) >= 0 and near(math.fsum(self.weights), 1.0, 1e-3)

    def ratio(self, other: "Fit") -> float | None:
        """Return by how much these weights are larger than others, where it is the same for all that are not 0."""
        pairs = [(a, b) for a, b in zip(self.weights, other.weights, strict=True) if not is_zero(a, self.weights)]
        if not pairs or any(b == 0 for _, b in pairs):
            return None
        ratios = [a / b for a, b in pairs]
        return ratios[0] if all(near(each, ratios[0]) for each in ratios) else None


def near(one: float, other: float, tolerance: float = 1e-4) -> bool:
    """Whether two weights are the same but for rounding."""
    return math.isclose(one, other, rel_tol=tolerance)


def is_zero(weight: float, among: Sequence[float]) -> bool:
    """Whether a micro-batch was left out."""
    return abs(weight) <= 1e-6 * max(map(abs, among), default=0.0)


def fitted(
    gradient: Mapping[str, Tensor],
    parts: Sequence[Mapping[str, Tensor]],
    alone: Mapping[str, Tensor] | None = None,
    names: Sequence[str] | None = None,
) -> Fit | None:
    """Find the weights; None where the micro-batches' gradients are too much alike to tell them."""
    every = [_joined(part, names) for part in parts]
    # A micro-batch that counts nothing, as where all targets are ignored, has no gradient and weighs nothing.
    telling = [place for place, each in enumerate(every) if names is not None or bool(each.any())]
    columns = [every[place] for place in telling] + ([] if alone is None else [_joined(alone, names)])
    if not columns:
        return None
    target = _joined(gradient, names)
    scales = torch.stack([column.norm() for column in columns])
    size = float(target.norm())
    if not torch.isfinite(scales).all() or not math.isfinite(size) or size == 0 or bool((scales == 0).any()):
        return None
    matrix = torch.stack(columns, dim=1) / scales
    if matrix.shape[0] <= matrix.shape[1]:
        return None
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    if float(values[-1]) < _DEPENDENT * float(values[0]):
        return None
    found = right.mT @ ((left.mT @ target) / values)
    residual = float((matrix @ found - target).norm()) / size
    values_found = [float(each) for each in found / scales]
    weights = dict(zip(telling, values_found, strict=False))
    of_alone = 0.0 if alone is None else values_found[-1]
    return Fit(tuple(weights.get(place, 0.0) for place in range(len(parts))), of_alone, residual)


def clamped(
    gradient: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], alone: Mapping[str, Tensor] | None
) -> tuple[Fit, float] | None:
    """Find the weights of a gradient that was clipped by value, and the limit, by the elements below it; else None."""
    limit = max((float(each.abs().max()) for each in gradient.values() if each.numel()), default=0.0)
    below = {name: each.abs() < limit for name, each in gradient.items()}

    def only(some: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: some[name][inside] for name, inside in below.items()}

    fit = fitted(only(gradient), [only(part) for part in parts], None if alone is None else only(alone))
    if fit is None:
        return None
    columns = list(zip(fit.weights, parts, strict=True))
    columns += [] if alone is None else [(fit.alone, alone)]
    whole = {name: torch.stack([weight * part[name] for weight, part in columns]).sum(0) for name in gradient}
    apart = math.fsum(float((whole[name].clamp(-limit, limit) - gradient[name]).square().sum()) for name in gradient)
    size = math.fsum(float(each.square().sum()) for each in gradient.values())
    return Fit(fit.weights, fit.alone, max(fit.residual, math.sqrt(apart / size))), limit


def supposed(
    gradient: Mapping[str, Tensor],
    parts: Sequence[Mapping[str, Tensor]],
    right: Sequence[float],
    sizes: Sequence[int],
) -> Fit:
    """Try the weights that loops usually have, where the gradients cannot tell; the nearest of them."""
    target, columns = _joined(gradient, None), torch.stack([_joined(part, None) for part in parts], dim=1)
    size = float(target.norm()) or 1.0
    best = Fit(tuple(right), 0.0, math.inf)
    for weights in _usual(right, sizes):
        apart = float((columns @ torch.tensor(weights, dtype=torch.float64) - target).norm()) / size
        if apart < best.residual * _CLEARLY:  # samples that are alike fit several: the first that does
            best = Fit(weights, 0.0, apart)
    return best


def _usual(right: Sequence[float], sizes: Sequence[int]) -> Iterator[tuple[float, ...]]:
    """Yield the right weights first, then those of the usual mistakes."""
    number, total = len(right), sum(sizes)
    equal, one = (1 / number,) * number, (1.0,) * number
    by_samples = tuple(size / total for size in sizes)
    last, first = (0.0,) * (number - 1) + (1.0,), (1.0,) + (0.0,) * (number - 1)
    not_last, not_first = (1.0,) * (number - 1) + (0.0,), (0.0,) + (1.0,) * (number - 1)
    for kept in (one, not_last, last, first, not_first):
        for weights in (tuple(right), equal, by_samples, one):
            for factor in (1.0, number, 1 / number):
                yield tuple(factor * weight * keeps for weight, keeps in zip(weights, kept, strict=True))


def _joined(gradient: Mapping[str, Tensor], names: Sequence[str] | None) -> Tensor:
    chosen = [gradient[name] for name in (gradient if names is None else names)]
    return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.float64)

"""By which weights micro-batches add up to a gradient, and which mistakes such weights show."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.batch.tree import leaves
from bigbatch.verification.model_copy import Gradients
from bigbatch.verification.result import Cause, cause, listed
from bigbatch.verification.runner import Runner

_ELEMENTS, _LEAST = 1 << 17, 64  # that are kept of all parameters, and of one
_DEPENDENT = 1e-6  # of the largest singular value: below it weights cannot be told apart
_SHOWN = 6  # weights


class Fit(NamedTuple):
    """A gradient as a weighted sum of the micro-batches' own, and of a term of parameters alone."""

    weights: tuple[float, ...]
    alone: float = 0.0  # the weight of the term of parameters alone
    residual: float = 0.0  # of the gradient, relatively: what no weights explain; infinite where many weights do


def sampled(gradients: Gradients) -> Tensor:
    """Return elements of each gradient, spread over it, as one vector on the host."""
    most = max(_LEAST, _ELEMENTS // max(len(gradients), 1))
    return torch.cat([g.flatten()[:: -(-g.numel() // most) or 1].cpu() for g in gradients.values()])


def fit(target: Tensor, parts: Sequence[Tensor], alone: Tensor | None = None) -> Fit:
    """Find the weights by least squares; all alike where micro-batches are too alike for that."""
    columns = [*parts, torch.zeros_like(target) if alone is None else alone]
    sizes = torch.stack([each.norm() for each in columns])
    scaled = torch.where(sizes > 0, sizes, 1.0)  # what counts nothing weighs nothing
    if 0 < int((sizes > 0).sum()) < len(target) and bool(sizes.isfinite().all()):
        matrix = torch.stack(columns, dim=1) / scaled
        solved, _, rank, _ = torch.linalg.lstsq(matrix, target[:, None], rcond=_DEPENDENT, driver="gelsd")
        if int(rank) == int((sizes > 0).sum()):
            *weights, of_alone = (solved[:, 0] * (sizes > 0) / scaled).tolist()
            left = float((matrix @ solved - target[:, None]).norm())
            return Fit(tuple(weights), of_alone, left / (float(target.norm()) or 1.0))
    return Fit((1 / len(parts),) * len(parts), 0.0, math.inf)


def near(one: float, other: float, tolerance: float = 1e-4) -> bool:
    """Whether two weights are the same but for rounding."""
    return math.isclose(one, other, rel_tol=tolerance)


def _is_zero(weight: float, among: Sequence[float]) -> bool:
    return abs(weight) <= 1e-6 * max(map(abs, among), default=0.0)


def proportion(weights: Sequence[float]) -> str:
    """Write weights as 0.5 : 0.3 : 0.2; rounded twice, so that weights which differ by rounding look the same."""
    shown = " : ".join(f"{float(f'{weight:.6g}'):.3g}" for weight in weights[:_SHOWN])
    return f"{shown} : ..." if len(weights) > _SHOWN else shown


def mistakes(runner: Runner, taken: Fit, right: Fit, *, has_alone: bool = False) -> Iterator[Cause]:
    """Tell what is wrong with the weights that were used."""
    used, should, number = taken.weights, right.weights, len(taken.weights)
    out = [i for i in range(number) if _is_zero(used[i], used) and not _is_zero(should[i], should)]
    kept = [i for i in range(number) if i not in out]
    scale, is_common = _scale(used, should, kept)
    if out and kept:
        which = listed([str(i + 1) for i in out])
        text = f"micro-batch {which} of {number} did not come to the step, or was cleared before it"
        yield cause("dropped-micro-batch", "", text)
        share = math.fsum(should[i] for i in kept) / (math.fsum(should) or 1.0)
        if near(scale, number / len(kept), 1e-3) or near(scale * share, 1.0, 1e-3):
            scale = 1.0  # an average over those that are left
    counts = count_all(runner)
    count = _in_proportion_to(should, counts)
    if not near(scale, 1.0, 1e-3):
        text = f"the gradient is {scale:.4g} times the big batch's{_of_scale(scale, number, counts, count)}"
        yield cause("wrong-scale", "", text)
    if not is_common:
        text = f"micro-batches were weighted {proportion(used)}; the big batch weights them {proportion(should)}"
        text += f", in proportion to {count}" if count else ""
        yield cause("wrong-count", "", text, count=count or "count")
    if has_alone and not out:
        times, once = (math.fsum(used) + taken.alone) / scale, math.fsum(should) + right.alone
        text = f"a term that no sample is in is added {round(times, 3) + 0.0:g} times per window, instead of {once:.3g}"
        if not near(times, once, 1e-3):
            yield cause("wrong-count", "a term of parameters alone", text, count="count")


def _in_proportion_to(weights: Sequence[float], every: dict[str, list[float]]) -> str:
    """Return the count that the weights are in proportion to; nothing where none is."""
    whole = math.fsum(weights)
    for name, counts in every.items():
        total = math.fsum(counts)
        if total > 0 and whole and all(near(n / total, w / whole) for n, w in zip(counts, weights, strict=True)):
            return name
    return ""


def _of_scale(scale: float, number: int, counts: dict[str, list[float]], count: str) -> str:
    """Say which division is missing, or one too many, where all weights are wrong by one factor."""
    if near(scale, number):
        return f", once for each of {number} micro-batches: it was not divided"
    if near(scale, 1 / number):
        return ": it was divided by the number of micro-batches once too often"
    right = math.fsum(counts.get(count, ()))
    for other, total in ((name, math.fsum(each)) for name, each in counts.items()):
        if right and total and near(scale, right / total):
            return f", as if divided by {total:g}, {other}, instead of {right:g}, {count}"
    return ""


def _scale(used: Sequence[float], should: Sequence[float], kept: Sequence[int]) -> tuple[float, bool]:
    """Return the factor that all weights together are wrong by, and whether each is wrong by the same."""
    ratios = [a / b if b else math.inf for a, b in zip(used, should, strict=True) if not _is_zero(a, used)]
    if ratios and all(near(each, ratios[0]) for each in ratios):
        return ratios[0], True
    known = [i for i in kept if not _is_zero(should[i], should)]  # what counts nothing does not show its weight
    if known and all(near(used[i], used[known[0]]) for i in known):
        return used[known[0]] * len(used), False  # one weight for all: is it 1/n, as a mean has it, or 1, or 1/n twice?
    total = math.fsum(should[i] for i in kept)
    return math.fsum(used[i] for i in kept) / total if total else 1.0, False


def count_all(runner: Runner) -> dict[str, list[float]]:
    """Return what can be counted in each micro-batch, by what to type for it."""
    rows = [dict(_count(batch)) for batch in runner.micro_batches()]
    return {name: [row.get(name, math.nan) for row in rows] for name in rows[0]}


def _count(batch: object) -> Iterator[tuple[str, float]]:
    found = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    for path, leaf in found[:1]:
        yield f"len({path})", float(len(leaf))
    for path, leaf in sorted(found, key=lambda each: not any(word in each[0].lower() for word in ("label", "target"))):
        if leaf.is_floating_point() and bool(((leaf == 0) | (leaf == 1)).all()):
            yield f"{path}.sum()", float(leaf.sum())
        elif not leaf.is_floating_point() and not leaf.is_complex():
            for ignored in (-100, 0):
                yield f"({path} != {ignored}).sum()", float((leaf != ignored).sum())
                if leaf.dim() > 1:
                    yield f"({path}[..., 1:] != {ignored}).sum()", float((leaf[..., 1:] != ignored).sum())

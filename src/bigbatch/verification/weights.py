"""What is left of a difference when the model is not its cause: the loss's terms, or the weights of a loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.batch.tree import leaves
from bigbatch.errors import BigBatchError, LossError
from bigbatch.options import Options
from bigbatch.verification.result import OUTSIDE, Cause, cause, listed
from bigbatch.verification.runner import Runner, Strategy
from bigbatch.verification.switches import OUTPUTS, PLACE, Off
from bigbatch.verification.tolerance import Comparison, Gradients, Tolerance, is_zero, relative

_ELEMENTS, _LEAST = 1 << 17, 64  # that are kept of all parameters, and of one
_DEPENDENT = 1e-6  # of the largest singular value: below it weights cannot be told apart
_SHOWN = 6  # weights
_ELSEWHERE = 100  # times the residual of a fit: what a fit to other gradients may leave
_BY_CHANCE = 2  # elements of a gradient that are the same


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
    sizes = [float(each.norm()) for each in columns]
    kept = [place for place, size in enumerate(sizes) if size]  # what counts nothing weighs nothing
    if 0 < len(kept) < len(target) and math.isfinite(math.fsum(sizes)):
        matrix = torch.stack([columns[place] / sizes[place] for place in kept], dim=1)
        solved, _, rank, _ = torch.linalg.lstsq(matrix, target[:, None], rcond=_DEPENDENT, driver="gelsd")
        if int(rank) == len(kept):
            found = {place: float(solved[at]) / sizes[place] for at, place in enumerate(kept)}
            *weights, of_alone = (found.get(place, 0.0) for place in range(len(columns)))
            left = float((matrix @ solved - target[:, None]).norm())
            return Fit(tuple(weights), of_alone, left / (float(target.norm()) or 1.0))
    return Fit((1 / len(parts),) * len(parts), 0.0, math.inf)


def _near(one: float, other: float, tolerance: float = 1e-4) -> bool:
    """Whether two weights are the same but for rounding."""
    return math.isclose(one, other, rel_tol=tolerance)


def _is_zero(weight: float, among: Sequence[float]) -> bool:
    """Whether a micro-batch was left out."""
    return abs(weight) <= 1e-6 * max(map(abs, among), default=0.0)


def _proportion(weights: Sequence[float]) -> str:
    """Write weights as 0.5 : 0.3 : 0.2; rounded twice, so that weights which differ by rounding look the same."""
    shown = " : ".join(f"{float(f'{weight:.6g}'):.3g}" for weight in weights[:_SHOWN])
    return f"{shown} : ..." if len(weights) > _SHOWN else shown


@dataclass
class Weights:
    """The weights that micro-batches had in a window, and those that they should have had."""

    runner: Runner
    tolerance: Tolerance
    off: Off
    left: Comparison  # with all of the model's causes off
    coupling_place: Callable[[], str]

    def explain(self) -> list[Cause]:
        """Return what explains the difference."""
        runner, limit = self.runner, 10 * self.tolerance.loose
        each = list(runner.per_micro_batch(self.off))
        parts = list(map(sampled, each))
        empty = [str(place) for place, part in enumerate(parts, 1) if not part.isfinite().all()]
        if empty:
            text = (
                f"micro-batch {listed(empty)} of {len(parts)} has no finite gradient: a mean over nothing is no number"
            )
            return [cause("wrong-count", OUTSIDE, text, count="count.clamp(min=1)")]
        alone = self._of_parameters_alone(self.off)
        used, right = (fit(sampled(side), parts, alone) for side in (self.left.found, self.left.truth))
        if right.residual <= limit and self._hold_elsewhere(right, _ELSEWHERE * limit):
            if used.residual > limit:
                return self._of_clamped()
            return list(self._mistakes(used, right, has_alone=alone is not None))
        text = "how micro-batches add up changes with the model's own weights, as for a root or a logarithm of a mean"
        if right.residual > limit:
            if counts := self._of_several_counts(each, limit):
                return counts
            text = (
                "no weights of micro-batches add up to the big batch's gradient: samples are compared with each other"
            )
        where = self.coupling_place()
        if where == OUTSIDE and math.isinf(right.residual):
            return []
        by_samples = Fit(tuple(size / runner.batch.size for size in runner.sizes))  # what a loop may have meant
        beside = [] if used.residual > limit else self._mistakes(used, by_samples)
        return [cause("coupled-samples", where, text), *beside]

    def _of_parameters_alone(self, off: Off) -> Tensor | None:
        """Return the gradient of terms that no sample is in; None where there are none."""
        try:
            alone = self.runner.whole(off | OUTPUTS).gradients
        except LossError:  # no graph is left
            return None
        return None if is_zero(alone) else sampled(alone)

    def _hold_elsewhere(self, right: Fit, limit: float) -> bool:
        """Whether the right weights are right at other weights of the model, too: where they are counts, they are."""
        off = self.off | PLACE
        truth, alone = sampled(self.runner.whole(off).gradients), self._of_parameters_alone(off)
        found = sampled(self.runner.weighted(right.weights, off))
        found = found if alone is None else found + right.alone * alone
        return not float((found - truth).norm()) > limit * float(truth.norm())

    def _of_several_counts(self, each: Sequence[Gradients], limit: float) -> list[Cause]:
        """Perhaps each term of the loss has its own count: BigStep reads them, or parameters show them apart."""
        truth, options = self.left.truth, Options(check=False, batch_norm="micro")
        found = "the loss has several terms, averaged over different things"
        try:
            own = relative(self.runner.accumulated(self.off, Strategy("BigStep", options)).gradients, truth)
        except BigBatchError:
            own = {"": math.inf}
        if self.tolerance.is_negligible(own):
            found += ": weighting each by its own count, as BigStep does, makes the gradients equal"
        else:
            means = dict[str, str]()
            for name, target in truth.items():
                of_one = fit(sampled({name: target}), [sampled({name: gradients[name]}) for gradients in each])
                if of_one.residual <= limit and min(of_one.weights) >= 0 and _near(sum(of_one.weights), 1.0, 1e-3):
                    means.setdefault(_proportion(of_one.weights), name)
            if len(means) < 2:  # noqa: PLR2004
                return []
            found += ": " + ", ".join(f"'{name}' adds up by {weights}" for weights, name in means.items())
        return [cause("wrong-count", OUTSIDE, found, count="its own count")]

    def _of_clamped(self) -> list[Cause]:
        """A gradient that was clipped by value has many elements of one size, and none that are larger."""
        sizes = sampled(self.left.found).abs()
        limit, number = float(sizes.max()), int((sizes == sizes.max()).sum())
        if number <= _BY_CHANCE or not limit:
            return []
        text = f"no element of the gradient is beyond {limit:.3g}, which {number} are at: it was clipped by value"
        return [cause("clipping", "clipping by value", text)]

    def _mistakes(self, taken: Fit, right: Fit, *, has_alone: bool = False) -> Iterator[Cause]:
        """Tell what is wrong with the weights that were used."""
        used, should, number, runner = taken.weights, right.weights, len(taken.weights), self.runner
        out = [i for i in range(number) if _is_zero(used[i], used) and not _is_zero(should[i], should)]
        kept = [i for i in range(number) if i not in out]
        scale, is_common = _scale(used, should, kept)
        if out and kept:
            which = listed([str(i + 1) for i in out])
            text = f"micro-batch {which} of {number} did not come to the step, or was cleared before it"
            yield cause("dropped-micro-batch", "", text)
            share = math.fsum(should[i] for i in kept) / (math.fsum(should) or 1.0)
            if _near(scale, number / len(kept), 1e-3) or _near(scale * share, 1.0, 1e-3):
                scale = 1.0  # an average over those that are left
        counts = count_all(runner)
        count = _in_proportion_to(should, counts)
        if not _near(scale, 1.0, 1e-3):
            text = f"the gradient is {scale:.4g} times the big batch's"
            totals = {name: math.fsum(each) for name, each in counts.items()}
            yield cause("wrong-scale", "", text + _of_scale(scale, number, totals, count))
        if not is_common:
            text = f"micro-batches were weighted {_proportion(used)}; the big batch weights them {_proportion(should)}"
            text += f", in proportion to {count}" if count else ""
            yield cause("wrong-count", "", text, count=count or "count")
        if has_alone and not out:
            times, once = (math.fsum(used) + taken.alone) / scale, math.fsum(should) + right.alone
            text = f"a term that no sample is in is added {round(times, 3):g} times per window, instead of {once:.3g}"
            if not _near(times, once, 1e-3):
                yield cause("wrong-count", "a term of parameters alone", text, count="count")


def _in_proportion_to(weights: Sequence[float], every: dict[str, list[float]]) -> str:
    """Return the count that the weights are in proportion to; nothing where none is."""
    whole = math.fsum(weights)
    for name, counts in every.items():
        total = math.fsum(counts)
        if total > 0 and whole and all(_near(n / total, w / whole) for n, w in zip(counts, weights, strict=True)):
            return name
    return ""


def _of_scale(scale: float, number: int, totals: dict[str, float], count: str) -> str:
    """Say which division is missing, or one too many, where all weights are wrong by one factor."""
    known = {float(number): f", once for each of {number} micro-batches: it was not divided"}
    known[1 / number] = ": it was divided by the number of micro-batches once too often"
    for other, total in totals.items() if count else ():
        if total:
            text = f", as if divided by {total:g}, {other}, instead of {totals[count]:g}, {count}"
            known.setdefault(totals[count] / total, text)
    return next((text for factor, text in known.items() if _near(scale, factor)), "")


def _scale(used: Sequence[float], should: Sequence[float], kept: Sequence[int]) -> tuple[float, bool]:
    """Return the factor that all weights together are wrong by, and whether each is wrong by the same."""
    ratios = [a / b if b else math.inf for a, b in zip(used, should, strict=True) if not _is_zero(a, used)]
    if ratios and all(_near(each, ratios[0]) for each in ratios):
        return ratios[0], True
    known = [i for i in kept if not _is_zero(should[i], should)]  # what counts nothing does not show its weight
    if known and all(_near(used[i], used[known[0]]) for i in known):
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

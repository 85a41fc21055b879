"""What is left of a difference when the model is not its cause: the loss's terms, or the weights of a loop."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.batch.tree import leaves
from bigbatch.errors import BigBatchError, LossError
from bigbatch.options import Options
from bigbatch.verification.result import Cause, listed
from bigbatch.verification.runner import Runner, Samples
from bigbatch.verification.suspects import OUTSIDE
from bigbatch.verification.switches import OUTPUTS, PLACE, Off
from bigbatch.verification.tolerance import Comparison, Gradients, Tolerance, is_zero, relative

_ELEMENTS, _LEAST = 1 << 17, 64  # that are kept of all parameters, and of one
_DEPENDENT = 1e-6  # of the largest singular value: below it weights cannot be told apart
_SCALES = 7  # a loss scale is a power of two above this one
_PLAINLY = 1e-3  # a residual that is no rounding in float32
_SHOWN = 6  # weights
_ELSEWHERE = 100  # times the residual of a fit: what a fit to other gradients may leave
_BY_CHANCE = 2  # elements of a gradient that are the same
_CLAMP = "Divide by no less than one, inside the loss:  loss.sum() / count.clamp(min=1); return counted(loss, count)"
_ONCE = (  # for BigStep, and for a loop
    "Say that it counts once in a window:  counted(loss, ...) + counted(penalty, 'once')",
    "Add it once in a window:  penalty.backward(), outside the loop over micro-batches.",
)


class Fit(NamedTuple):
    """A gradient as a weighted sum of the micro-batches' own, and of a term of parameters alone."""

    weights: tuple[float, ...]
    alone: float  # the weight of the term of parameters alone
    residual: float  # of the gradient, relatively: what no weights explain


def sampled(gradients: Gradients) -> Tensor:
    """Return elements of each gradient as one vector on the host."""
    return torch.cat(_elements(gradients))


def _elements(gradients: Gradients) -> list[Tensor]:
    """Return elements of each gradient, spread over it."""
    most = max(_LEAST, _ELEMENTS // max(len(gradients), 1))
    return [g.flatten()[:: -(-g.numel() // most) or 1].cpu() for g in gradients.values()]


def fit(target: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], alone: Tensor | None = None) -> Fit:
    """Find the weights by least squares, or, where micro-batches are too alike for that, among the usual ones."""
    columns = dict(enumerate(parts)) if alone is None else {**dict(enumerate(parts)), len(parts): alone}
    columns = {place: each for place, each in columns.items() if each.any()}  # what counts nothing weighs nothing
    size, scale = float(target.norm()) or 1.0, torch.tensor([float(each.norm()) for each in columns.values()]).double()
    if columns and target.any() and math.isfinite(size + float(scale.sum())) and len(target) > len(columns):
        matrix = torch.stack(list(columns.values()), dim=1) / scale
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        if float(values[-1]) >= _DEPENDENT * float(values[0]):
            solved = right.mT @ ((left.mT @ target) / values)
            found = dict(zip(columns, (solved / scale).tolist(), strict=True))
            *weights, of_alone = (found.get(place, 0.0) for place in range(len(parts) + 1))
            return Fit(tuple(weights), of_alone, float((matrix @ solved - target).norm()) / size)
    best = Fit(tuple(each / sum(sizes) for each in sizes), 0.0, math.inf)
    for usual in _usual_weights(sizes):  # the first of the nearest
        apart = float((torch.stack(list(parts), dim=1) @ torch.tensor(usual).double() - target).norm()) / size
        if apart < best.residual / 100:
            best = Fit(usual, 0.0, apart)
    return best if best.residual < _PLAINLY else best._replace(residual=math.inf)


def _usual_weights(sizes: Sequence[int]) -> Iterator[tuple[float, ...]]:
    number = len(sizes)
    for kept in (range(number), range(number - 1), [number - 1], [0], range(1, number)):
        for weights in ([size / sum(sizes) for size in sizes], [1 / number] * number):
            for factor in (1.0, number, 1 / number):
                yield tuple(factor * weight if place in kept else 0.0 for place, weight in enumerate(weights))


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
    backwards: int | None  # of a loop: how many reached the model

    def __post_init__(self) -> None:
        """Run each micro-batch by itself."""
        self._sizes, self._limit = self.runner.samples.sizes, 10 * self.tolerance.loose
        self._each = self._each_micro_batch(self.off)
        self._counts = count_all(self.runner.samples)

    def explain(self) -> tuple[list[Cause], tuple[float, ...]]:
        """Return what explains the difference, and the weights that are right, where there are any."""
        runner, limit = self.runner, self._limit
        empty = [(str(place), loss) for place, (loss, each) in enumerate(self._each, 1) if not each.isfinite().all()]
        if empty:
            which = f"micro-batch {listed([place for place, _ in empty])} of {len(self._each)}"
            text = f"{which} has a loss of {empty[0][1]} by itself: a mean over nothing is no number"
            return [runner.cause("wrong-count", OUTSIDE, text, remedy=_CLAMP)], ()
        alone = self._of_parameters_alone(self.off)
        used, right = (
            fit(sampled(gradients), [each for _, each in self._each], self._sizes, alone)
            for gradients in (self.left.found, self.left.truth)
        )
        if right.residual > limit:
            counts = self._of_several_counts()
            if counts or (runner.is_loop and math.isinf(right.residual)):
                return counts, ()
            text = "no weights of micro-batches add up to the big batch's gradient: the loss compares samples, or takes"
            return self._of_coupled(f"{text} a mean, a rank or a threshold of all of them", used), ()
        if not self._hold_elsewhere(right):
            text = "the weights by which micro-batches add up to the big batch change with the model's own weights, as"
            return self._of_coupled(f"{text} those of a root or a logarithm of a mean do", used), ()
        if used.residual > limit:
            return self._of_clamped(), right.weights
        return list(self._mistakes(used, right, has_alone=alone is not None)), right.weights

    def _each_micro_batch(self, off: Off) -> list[tuple[float, Tensor]]:
        return [(loss, sampled(each)) for loss, each in self.runner.per_micro_batch(off)]

    def _of_parameters_alone(self, off: Off) -> Tensor | None:
        """Return the gradient of terms that no sample is in; None where there are none."""
        try:
            alone = self.runner.whole({**off, OUTPUTS: None}).gradients
        except LossError:  # no graph is left
            return None
        return None if is_zero(alone) else sampled(alone)

    def _hold_elsewhere(self, right: Fit) -> bool:
        """Whether the right weights are right at other weights of the model, too: where they are counts, they are."""
        off = {**self.off, PLACE: None}
        truth, alone = sampled(self.runner.whole(off).gradients), self._of_parameters_alone(off)
        left = truth if alone is None else truth - right.alone * alone
        for weight, (_, part) in zip(right.weights, self._each_micro_batch(off), strict=True):
            left = left - weight * part
        return not float(left.norm()) > _ELSEWHERE * self._limit * float(truth.norm())

    def _of_coupled(self, found: str, used: Fit) -> list[Cause]:
        """No weights are right for a coupled loss: compare a loop with what it meant, by samples or all alike."""
        where = OUTSIDE if self.runner.has_loss_fn else f"{type(self.runner.model.own.models[0]).__name__}.forward"
        coupled = self.runner.cause("coupled-samples", where, found)
        if used.residual > self._limit:
            return [coupled]
        number, total = len(self._sizes), sum(self._sizes)
        meant = (tuple(size / total for size in self._sizes), (1 / number,) * number)
        every = [list(self._mistakes(used, Fit(weights, 0.0, 0.0))) for weights in meant]
        return [coupled, *(each for each in min(every, key=len) if each.kind != "wrong-count")]

    def _of_several_counts(self) -> list[Cause]:
        """Perhaps each term of the loss has its own count: BigStep reads them, or parameters show them apart."""
        options = Options(check=False, batch_norm="micro")
        by_terms = replace(self.runner.strategy, name="BigStep", size=max(self._sizes), options=options)
        found = "the loss has several terms, averaged over different things, and no one weight per micro-batch fits"
        try:
            own = relative(self.runner.accumulated(self.off, by_terms).gradients, self.left.truth)
        except BigBatchError:
            own = {"": math.inf}
        if self.tolerance.is_negligible(own):
            found += ". Weighting each term by its own count, as BigStep does, makes the gradients equal"
        else:
            means, elements = dict[tuple[float, ...], str](), _elements(self.left.truth)
            columns = zip(*(part.split([len(each) for each in elements]) for _, part in self._each), strict=True)
            for name, target, parts in zip(self.left.truth, elements, columns, strict=True):
                each = fit(target, parts, self._sizes)
                if each.residual <= self._limit and min(each.weights) >= 0 and _near(sum(each.weights), 1.0, 1e-3):
                    means.setdefault(tuple(round(weight, 4) for weight in each.weights), name)
            if len(means) < 2:  # noqa: PLR2004
                return []
            found += ": " + ", ".join(f"'{name}' adds up by {_proportion(each)}" for each, name in means.items())
        return [self.runner.cause("wrong-count", OUTSIDE, found, count="its own count")]

    def _of_clamped(self) -> list[Cause]:
        """A gradient that was clipped by value has many elements of one size, and none that are larger."""
        sizes = sampled(self.left.found).abs()
        limit = float(sizes.max())
        number = int((sizes == limit).sum())
        if number <= _BY_CHANCE or not limit:
            return []
        text = f"no element of the gradient is beyond {limit:.3g}, which {number} are at: it was clipped by value"
        return [self.runner.cause("clipping", "clipping by value", text)]

    def _mistakes(self, taken: Fit, right: Fit, *, has_alone: bool = False) -> Iterator[Cause]:
        """Tell what is wrong with the weights that were used."""
        used, should, number, runner = taken.weights, right.weights, len(taken.weights), self.runner
        out = [i for i in range(number) if _is_zero(used[i], used) and not _is_zero(should[i], should)]
        kept = [i for i in range(number) if i not in out]
        scale, is_common = _scale(used, should, kept)
        if out and kept:
            text = f"micro-batch {listed([str(i + 1) for i in out])} of {number} has no weight"
            first = max(out) < min(kept)
            cleared = first and (self.backwards is None or self.backwards > len(kept))
            if cleared:
                text += ": gradients were cleared inside the window, after it"
            elif first:
                text += ": its gradient did not come to the step, and nothing was cleared"
            yield runner.cause("dropped-micro-batch", "zero_grad" if cleared else "", text)
            share = math.fsum(should[i] for i in kept) / (math.fsum(should) or 1.0)
            if _near(scale, number / len(kept), 1e-3) or _near(scale * share, 1.0, 1e-3):
                scale = 1.0  # an average over those that are left
        count = self._in_proportion_to(should)
        if not _near(scale, 1.0, 1e-3):
            text = f"the gradient is {scale:.4g} times the big batch's{self._of_scale(scale, right, count)}"
            yield runner.cause("wrong-scale", "", text)
        if not is_common:
            text = f"micro-batches were weighted {_proportion(used)}; the big batch weights them {_proportion(should)}"
            yield runner.cause("wrong-count", "", text + (f", in proportion to {count}" if count else ""), count=count)
        if has_alone and not out:
            times, once = (math.fsum(used) + taken.alone) / scale, math.fsum(should) + right.alone
            text = f"a term that no sample is in is added {times:.3g} times per window; it should be added {once:.3g}"
            text += " times: it was added for each micro-batch" if _near(times, number * once, 1e-3) else " times"
            if abs(times) <= 1e-6 * abs(once):
                text = "a term that no sample is in is added in the big batch, and not in the window"
            if not _near(times, once, 1e-3):
                remedy = _ONCE[runner.is_loop]
                yield runner.cause("wrong-count", "a term of parameters alone", text, remedy=remedy)

    def _in_proportion_to(self, weights: Sequence[float]) -> str:
        """Return the count that the weights are in proportion to; nothing where none is."""
        whole = math.fsum(weights)
        for name, counts in self._counts.items():
            total = math.fsum(counts)
            if total > 0 and whole and all(_near(n / total, w / whole) for n, w in zip(counts, weights, strict=True)):
                return name
        return ""

    def _of_scale(self, scale: float, right: Fit, count: str) -> str:
        """Say which division is missing, or one too many, where all weights are wrong by one factor."""
        number, sums = len(right.weights), all(_near(weight, 1.0) for weight in right.weights)
        totals, divisor, power = (
            {c: math.fsum(n) for c, n in self._counts.items()},
            number / scale,
            math.log2(abs(scale)),
        )
        wanted = totals.get(count, math.nan) / scale
        other = next((each for each, total in totals.items() if each != count and _near(total, wanted)), "")
        rows = (  # the first that holds
            (scale < 0, ": its sign is turned, so a step goes uphill"),
            (not sums and _near(scale, number, 1e-3), f", once for each of {number} micro-batches: it was not divided"),
            (sums and _near(scale, 1 / number, 1e-3), ": a sum was divided"),
            (_near(scale, 1 / number, 1e-3), ": it was divided by the number of micro-batches twice"),
            (
                other,
                f", as if divided by {totals.get(other, 0):g}, {other}, instead of {totals.get(count, 0):g}, {count}",
            ),
            (power > _SCALES and _near(power, round(power), 1e-9), ", a power of two: a loss scale was left in"),
            (_near(divisor, round(divisor), 1e-5), f", as if divided by {round(divisor)} instead of {number}"),
        )
        return next((text for holds, text in rows if holds), "")


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


def count_all(samples: Samples) -> dict[str, list[float]]:
    """Return what can be counted in each micro-batch, by what to type for it."""
    rows = [dict(_count(batch)) for batch in samples.micro_batches(None)]
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

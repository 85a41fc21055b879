"""What is left of a difference when the model is not its cause: the loss's terms, or the weights of a loop."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
from bigbatch.verification.tolerance import Comparison, Gradients, Tolerance, is_finite, is_zero, relative

Parts = Sequence[Mapping[str, Tensor]]  # some elements of each micro-batch's gradient
_ELEMENTS, _LEAST = 1 << 17, 64  # that are kept of all parameters, and of one
_DEPENDENT = 1e-6  # of the largest singular value: below it weights cannot be told apart
_SCALES = 7  # a loss scale is a power of two above this one
_PLAINLY = 1e-3  # a residual that is no rounding in float32
_SHOWN = 6  # weights
_ELSEWHERE = 100  # times the residual of a fit: what a fit to other gradients may leave
_BY_CHANCE = 2  # elements of a gradient that are the same
_CLAMP = "Divide by no less than one, inside the loss:  loss.sum() / count.clamp(min=1); return counted(loss, count)"
_ONCE = "Say that it counts once in a window:  counted(loss, ...) + counted(penalty, 'once')"
_ONCE_IN_LOOP = "Add it once in a window:  penalty.backward(), outside the loop over micro-batches."


class Diagnosis(NamedTuple):
    """What explains a residual, and the weights that micro-batches should have had, where there are any."""

    causes: list[Cause]
    weights: tuple[float, ...] | None = None


class Fit(NamedTuple):
    """A gradient as a weighted sum of the micro-batches' own, and of a term of parameters alone."""

    weights: tuple[float, ...]
    alone: float  # the weight of the term of parameters alone
    residual: float  # of the gradient, relatively: what no weights explain

    def ratio(self, other: "Fit") -> float | None:
        """Return by which factor these weights are larger than others, where it is one for all that are not 0."""
        pairs = [(a, b) for a, b in zip(self.weights, other.weights, strict=True) if not _is_zero(a, self.weights)]
        ratios = [a / b if b else math.inf for a, b in pairs]
        return ratios[0] if ratios and all(_near(each, ratios[0]) for each in ratios) else None


def sampled(gradients: Gradients) -> dict[str, Tensor]:
    """Return elements of each gradient, spread over it, on the host."""
    most = max(_LEAST, _ELEMENTS // max(len(gradients), 1))
    return {name: g.flatten()[:: -(-g.numel() // most) or 1].cpu() for name, g in gradients.items()}


def fit(
    gradient: Mapping[str, Tensor], parts: Parts, sizes: Sequence[int], alone: Mapping[str, Tensor] | None = None
) -> Fit:
    """Find the weights by least squares, or, where micro-batches are too alike for that, among the usual ones."""
    target, every = _joined(gradient), [_joined(part) for part in parts]
    telling = [place for place, each in enumerate(every) if bool(each.any())]  # one that counts nothing weighs nothing
    columns = [every[place] for place in telling] + ([] if alone is None else [_joined(alone)])
    size, scales = float(target.norm()) or 1.0, [float(column.norm()) for column in columns]
    if columns and bool(target.any()) and math.isfinite(size + sum(scales)) and len(target) > len(columns):
        scale = torch.tensor(scales, dtype=torch.float64)
        matrix = torch.stack(columns, dim=1) / scale
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        if float(values[-1]) >= _DEPENDENT * float(values[0]):
            solved = right.mT @ ((left.mT @ target) / values)
            residual = float((matrix @ solved - target).norm()) / size
            weights = [float(each) for each in solved / scale]
            of_place = dict(zip(telling, weights, strict=False))
            of_alone = 0.0 if alone is None else weights[-1]
            return Fit(tuple(of_place.get(place, 0.0) for place in range(len(parts))), of_alone, residual)
    best = Fit(tuple(each / sum(sizes) for each in sizes), 0.0, math.inf)
    for usual in _usual_weights(sizes):  # the first of the nearest
        apart = torch.stack(every, dim=1) @ torch.tensor(usual, dtype=torch.float64) - target
        if float(apart.norm()) / size < best.residual / 100:
            best = Fit(usual, 0.0, float(apart.norm()) / size)
    return best if best.residual < _PLAINLY else best._replace(residual=math.inf)


def _usual_weights(sizes: Sequence[int]) -> Iterator[tuple[float, ...]]:
    number = len(sizes)
    for kept in (range(number), range(number - 1), [number - 1], [0], range(1, number)):
        for weights in ([size / sum(sizes) for size in sizes], [1 / number] * number):
            for factor in (1.0, number, 1 / number):
                yield tuple(factor * weight if place in kept else 0.0 for place, weight in enumerate(weights))


def _joined(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(gradient.values()))


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
        self._losses, self._parts = self._each_micro_batch(self.off)
        self._alone: dict[str, Tensor] | None = None
        self._counts = Counts(self.runner.samples)

    def explain(self) -> Diagnosis:
        """Compare the weights that were used with the right ones, where there are any."""
        runner, limit = self.runner, self._limit
        empty = [str(place + 1) for place, each in enumerate(self._parts) if not is_finite(each)]
        if empty:
            loss = self._losses[int(empty[0]) - 1]
            found = f"micro-batch {listed(empty)} of {len(self._losses)} has a loss of {loss} by itself: nothing in it "
            found += "is counted, and a mean over nothing is no number"
            return Diagnosis([runner.cause("wrong-count", OUTSIDE, found, remedy=_CLAMP)])
        self._alone = self._of_parameters_alone(self.off)
        used, right = self._fit(self.left.found), self._fit(self.left.truth)
        if right.residual <= limit and not self._hold_elsewhere(right):
            text = "the weights by which micro-batches add up to the big batch change with the model's own weights, as"
            return self._of_coupled(f"{text} those of a root or a logarithm of a mean do", used)
        if right.residual > limit:
            counts = self._of_several_counts()
            if counts or (runner.is_loop and math.isinf(right.residual)):
                return Diagnosis(counts)
            text = "no weights of micro-batches add up to the big batch's gradient: the loss compares samples, or takes"
            return self._of_coupled(f"{text} a mean, a rank or a threshold of all of them", used)
        if used.residual <= limit:
            return Diagnosis(list(self._mistakes(used, right)), right.weights)
        return Diagnosis(self._of_clamped(), right.weights)

    def _each_micro_batch(self, off: Off) -> tuple[list[float], Parts]:
        every = [(loss, sampled(each)) for loss, each in self.runner.per_micro_batch(off)]
        return [loss for loss, _ in every], [part for _, part in every]

    def _of_parameters_alone(self, off: Off) -> dict[str, Tensor] | None:
        """Return the gradient of terms that no sample is in; None where there are none."""
        try:
            alone = sampled(self.runner.whole({**off, OUTPUTS: None}).gradients)
        except LossError:  # no graph is left
            return None
        return None if is_zero(alone) else alone

    def _fit(self, gradients: Gradients) -> Fit:
        return fit(sampled(gradients), self._parts, self._sizes, self._alone)

    def _hold_elsewhere(self, right: Fit) -> bool:
        """Whether the right weights are right at other weights of the model, too: where they are counts, they are."""
        off = {**self.off, PLACE: None}
        columns, alone = list(self._each_micro_batch(off)[1]), self._of_parameters_alone(off)
        weights = [*right.weights, right.alone]
        columns += [] if alone is None else [alone]
        truth = _joined(sampled(self.runner.whole(off).gradients))
        left = truth - sum(weight * _joined(column) for weight, column in zip(weights, columns, strict=False))
        return not float(left.norm()) > _ELSEWHERE * self._limit * float(truth.norm())

    def _of_coupled(self, found: str, used: Fit) -> Diagnosis:
        """No weights are right for a coupled loss: compare a loop with what it meant, by samples or all alike."""
        model = type(self.runner.model.own.models[0]).__name__
        where = OUTSIDE if self.runner.has_loss_fn else f"{model}.forward"
        coupled = self.runner.cause("coupled-samples", where, found)
        if used.residual > self._limit:
            return Diagnosis([coupled])
        number, total = len(self._sizes), sum(self._sizes)
        meant = (tuple(size / total for size in self._sizes), (1 / number,) * number)
        every = [list(self._mistakes(used, Fit(weights, 0.0, 0.0))) for weights in meant]
        return Diagnosis([coupled, *(each for each in min(every, key=len) if each.kind != "wrong-count")])

    def _of_several_counts(self) -> list[Cause]:
        """Perhaps each term of the loss has its own count: BigStep reads them, or parameters show them apart."""
        runner, options = self.runner, Options(check=False, batch_norm="micro")
        by_terms = replace(runner.strategy, name="BigStep", size=max(self._sizes), options=options)
        found = "the loss has several terms, averaged over different things, and no one weight per micro-batch fits"
        try:
            own = relative(runner.accumulated(self.off, by_terms).gradients, self.left.truth)
        except BigBatchError:
            own = {"": math.inf}
        truth, means = sampled(self.left.truth), dict[tuple[float, ...], str]()
        for name in truth:
            each = fit({name: truth[name]}, [{name: part[name]} for part in self._parts], self._sizes)
            if each.residual <= self._limit and min(each.weights) >= 0 and _near(math.fsum(each.weights), 1.0, 1e-3):
                means.setdefault(tuple(round(weight, 4) for weight in each.weights), name)
        if self.tolerance.is_negligible(own):
            found += ". Weighting each term by its own count, as BigStep does, makes the gradients equal"
        elif len(means) > 1:
            found += ": " + ", ".join(f"'{name}' adds up by {_proportion(each)}" for each, name in means.items())
        else:
            return []
        return [runner.cause("wrong-count", OUTSIDE, found, count="its own count")]

    def _of_clamped(self) -> list[Cause]:
        """A gradient that was clipped by value has many elements of one size, and none that are larger."""
        sizes = _joined(sampled(self.left.found)).abs()
        limit = float(sizes.max()) if len(sizes) else 0.0
        number = int((sizes == limit).sum())
        if number <= _BY_CHANCE or not limit:
            return []
        text = f"no element of the gradient is beyond {limit:.3g}, which {number} are at: it was clipped by value"
        return [self.runner.cause("clipping", "clipping by value", text)]

    def _mistakes(self, taken: Fit, right: Fit) -> Iterator[Cause]:
        """Tell what is wrong with the weights that were used."""
        used, should, number, runner = taken.weights, right.weights, len(taken.weights), self.runner
        out = [i for i in range(number) if _is_zero(used[i], used) and not _is_zero(should[i], should)]
        kept = [i for i in range(number) if i not in out]
        ratio = taken.ratio(right)
        scale = ratio if ratio is not None else _common_scale(used, should, kept)
        share = math.fsum(should[i] for i in kept) / (math.fsum(should) or 1.0)
        if out and kept:
            first = max(out) < min(kept)
            cleared = first and (self.backwards is None or self.backwards > len(kept))
            text = f"micro-batch {listed([str(i + 1) for i in out])} of {number} has no weight"
            text += ": gradients were cleared inside the window, after it" if cleared else ""
            text += ": its gradient did not come to the step, and nothing was cleared" if first and not cleared else ""
            yield runner.cause("dropped-micro-batch", "zero_grad" if cleared else "", text)
            if _near(scale, number / len(kept), 1e-3) or _near(scale * share, 1.0, 1e-3):
                scale = 1.0  # an average over those that are left
        count = self._counts.in_proportion_to(should)
        if not _near(scale, 1.0, 1e-3):
            text = f"the gradient is {scale:.4g} times the big batch's{self._of_scale(scale, right, count)}"
            yield runner.cause("wrong-scale", "", text)
        if ratio is None:
            text = f"micro-batches were weighted {_proportion(used)}; the big batch weights them {_proportion(should)}"
            yield runner.cause("wrong-count", "", text + (f", in proportion to {count}" if count else ""), count=count)
        if self._alone is not None and not out:
            times, once = (math.fsum(used) + taken.alone) / scale, math.fsum(should) + right.alone
            if not _near(times, once, 1e-3):
                text = (
                    f"a term that no sample is in is added {times:.3g} times per window; it should be added {once:.3g}"
                )
                text += " times: it was added for each micro-batch" if _near(times, number * once, 1e-3) else " times"
                if abs(times) <= 1e-6 * abs(once):
                    text = "a term that no sample is in is added in the big batch, and not in the window"
                remedy = _ONCE_IN_LOOP if runner.is_loop else _ONCE
                yield runner.cause("wrong-count", "a term of parameters alone", text, remedy=remedy)

    def _of_scale(self, scale: float, right: Fit, count: str) -> str:
        """Say which division is missing, or one too many, where all weights are wrong by one factor."""
        number, sums = len(right.weights), all(_near(weight, 1.0) for weight in right.weights)
        other, divisor = self._counts.larger_by(count, 1 / scale) if count else "", number / scale
        total, power = self._counts.total, math.log2(abs(scale))
        rows = (  # the first that holds
            (scale < 0, ": its sign is turned, so a step goes uphill"),
            (not sums and _near(scale, number, 1e-3), f", once for each of {number} micro-batches: it was not divided"),
            (sums and _near(scale, 1 / number, 1e-3), ": a sum was divided"),
            (_near(scale, 1 / number, 1e-3), ": it was divided by the number of micro-batches twice"),
            (other, f", as if divided by {total(other):g}, {other}, instead of {total(count):g}, {count}"),
            (power > _SCALES and _near(power, round(power), 1e-9), ", a power of two: a loss scale was left in"),
            (_near(divisor, round(divisor), 1e-5), f", as if divided by {round(divisor)} instead of {number}"),
        )
        return next((text for holds, text in rows if holds), "")


def _common_scale(used: Sequence[float], should: Sequence[float], kept: Sequence[int]) -> float:
    """Return the factor that all weights together are wrong by, where each is wrong by its own."""
    known = [i for i in kept if not _is_zero(should[i], should)]  # what counts nothing does not show its weight
    if known and all(_near(used[i], used[known[0]]) for i in known):
        return used[known[0]] * len(used)  # one weight for all: is it 1/n, as a mean has it, or 1, or 1/n twice?
    total = math.fsum(should[i] for i in kept)
    return math.fsum(used[i] for i in kept) / total if total else 1.0


class Counts:
    """What can be counted in each micro-batch, by what to type for it."""

    def __init__(self, samples: Samples) -> None:
        self.rows = [dict(_count(batch)) for batch in samples.micro_batches(None)]

    def total(self, expression: str) -> float:
        """Return the count of the whole batch."""
        return math.fsum(row.get(expression, math.nan) for row in self.rows)

    def in_proportion_to(self, weights: Sequence[float]) -> str:
        """Return what the weights are in proportion to; nothing where nothing is."""
        whole = math.fsum(weights)
        for expression in self.rows[0]:
            total, pairs = self.total(expression), list(zip(self.rows, weights, strict=True))
            if (
                total > 0
                and whole
                and all(_near(row.get(expression, math.nan) / total, weight / whole) for row, weight in pairs)
            ):
                return expression
        return ""

    def larger_by(self, count: str, factor: float) -> str:
        """Return what comes to so many times a count; nothing where nothing does."""
        wanted = factor * self.total(count)
        return next((each for each in self.rows[0] if each != count and _near(self.total(each), wanted)), "")

    @property
    def are_alike(self) -> bool:
        """Whether all micro-batches count the same, whatever is counted."""
        counts = [name for name in self.rows[0] if not name.endswith("!= 0).sum()")]  # 0 may be a class
        return all(row.get(name) == self.rows[0][name] for row in self.rows for name in counts)


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

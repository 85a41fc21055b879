"""What is left of a difference when the model is not its cause: the loss's terms, or the weights of a loop."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.batch.tree import leaves
from bigbatch.errors import BigBatchError
from bigbatch.options import Options
from bigbatch.verification.causes.coupling import coupling_place
from bigbatch.verification.causes.model import OUTSIDE, Disabled
from bigbatch.verification.causes.remedies import cause, listed, proportion
from bigbatch.verification.result import Cause
from bigbatch.verification.runner import BigStepStrategy, Runner, Samples
from bigbatch.verification.tolerance import Gradients, Tolerance, is_finite, relative

Parts = Sequence[Mapping[str, Tensor]]  # some elements of each micro-batch's gradient
_ELEMENTS, _LEAST = 1 << 17, 64  # that are kept of all parameters, and of one
_DEPENDENT = 1e-6  # of the largest singular value: below it weights cannot be told apart
_PLAINLY = 1e-3  # a residual that is no rounding in float32
_SCALES = 256.0  # a loss scale is a power of two, and at least this
_BY_HAND = "If that is clipping by hand, it may be right: clip with torch.nn.utils, which verify leaves out."
_CLAMP = (
    "Divide by no less than one, inside the loss:  loss.sum() / count.clamp(min=1); then weight by count:  "
    "counted(loss, count)"
)


@dataclass(frozen=True)
class Residual:
    """A difference that is still there with all of the model's causes off."""

    runner: Runner
    tolerance: Tolerance
    off: Disabled
    truth: Gradients
    found: Gradients
    backwards: int | None = None  # of a loop: how many reached the model


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
        pairs = [(a, b) for a, b in zip(self.weights, other.weights, strict=True) if not is_zero(a, self.weights)]
        ratios = [a / b if b else math.inf for a, b in pairs]
        return ratios[0] if ratios and all(near(each, ratios[0]) for each in ratios) else None


def near(one: float, other: float, tolerance: float = 1e-4) -> bool:
    """Whether two weights are the same but for rounding."""
    return math.isclose(one, other, rel_tol=tolerance)


def is_zero(weight: float, among: Sequence[float]) -> bool:
    """Whether a micro-batch was left out."""
    return abs(weight) <= 1e-6 * max(map(abs, among), default=0.0)


def sampled_elements(truth: Gradients, numbers: Mapping[str, int]) -> Mapping[str, Tensor]:
    """Choose elements of each gradient: half where it is largest, half spread over it."""
    most, found = max(_LEAST, _ELEMENTS // max(len(numbers), 1)), {}
    for name, number in numbers.items():
        gradient, spread = truth.get(name), torch.linspace(0, number - 1, min(number, most // 2), dtype=torch.float64)
        largest = (
            spread[:0] if gradient is None else gradient.flatten().abs().topk(min(number, most // 2)).indices.cpu()
        )
        found[name] = torch.arange(number) if number <= most else torch.cat([spread.long(), largest]).sort().values
    return found


def take(gradients: Gradients, indices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return chosen elements on the host, zero where there is no gradient."""
    return {
        name: torch.zeros(len(chosen), dtype=torch.float64) if g is None else g.flatten()[chosen.to(g.device)].cpu()
        for name, chosen in indices.items()
        for g in [gradients.get(name)]
    }


def fit(
    gradient: Mapping[str, Tensor], parts: Parts, alone: Mapping[str, Tensor] | None = None, names: Sequence[str] = ()
) -> Fit | None:
    """Find the weights by least squares; None where the micro-batches' gradients are too alike to tell them."""
    every = [_joined(part, names) for part in parts]
    telling = [place for place, each in enumerate(every) if bool(each.any())]  # one that counts nothing weighs nothing
    columns = [every[place] for place in telling] + ([] if alone is None else [_joined(alone, names)])
    target = _joined(gradient, names)
    size, scales = float(target.norm()), [float(column.norm()) for column in columns]
    if not columns or not size or not math.isfinite(size + sum(scales)) or len(target) <= len(columns):
        return None
    scale = torch.tensor(scales, dtype=torch.float64)
    matrix = torch.stack(columns, dim=1) / scale
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    if float(values[-1]) < _DEPENDENT * float(values[0]):
        return None
    solved = right.mT @ ((left.mT @ target) / values)
    residual = float((matrix @ solved - target).norm()) / size
    weights = [float(each) for each in solved / scale]
    of_place = dict(zip(telling, weights, strict=False))
    of_alone = 0.0 if alone is None else weights[-1]
    return Fit(tuple(of_place.get(place, 0.0) for place in range(len(parts))), of_alone, residual)


def usual_fit(gradient: Mapping[str, Tensor], parts: Parts, sizes: Sequence[int]) -> Fit:
    """Try the weights that loops usually have, where least squares cannot tell; the first of the nearest."""
    target, columns = _joined(gradient), torch.stack([_joined(part) for part in parts], dim=1)
    best = Fit(tuple(size / sum(sizes) for size in sizes), 0.0, math.inf)
    for weights in _usual_weights(sizes):
        apart = float((columns @ torch.tensor(weights, dtype=torch.float64) - target).norm()) / (
            float(target.norm()) or 1.0
        )
        if apart < best.residual / 100:
            best = Fit(weights, 0.0, apart)
    return best


def _usual_weights(sizes: Sequence[int]) -> Iterator[tuple[float, ...]]:
    number = len(sizes)
    for kept in (range(number), range(number - 1), [number - 1], [0], range(1, number)):
        for weights in ([size / sum(sizes) for size in sizes], [1 / number] * number):
            for factor in (1.0, number, 1 / number):
                yield tuple(factor * weight if place in kept else 0.0 for place, weight in enumerate(weights))


def _joined(gradient: Mapping[str, Tensor], names: Sequence[str] = ()) -> Tensor:
    return torch.cat([gradient[name] for name in names or gradient])


def explain(left: Residual) -> Diagnosis:
    """Find out what is wrong with the loss or with the loop."""
    runner, loop = left.runner, left.runner.is_loop
    indices = sampled_elements(left.truth, {name: p.numel() for name, p in runner.model.own.parameters.items()})
    every = runner.per_micro_batch(left.off, lambda gradients: take(gradients, indices))
    empty = [place for place, each in enumerate(every.gradients) if not is_finite(each)]
    if empty:
        found = (
            f"micro-batch {listed([str(place + 1) for place in empty])} of {len(every.losses)} has a loss of "
            f"{every.losses[empty[0]]} by itself: nothing in it is counted, and a mean over nothing is no number"
        )
        return Diagnosis([cause("wrong-count", OUTSIDE, found, loop=loop, remedy=_CLAMP)])
    return _Weights(left, indices, every.gradients).explain()


class _Weights:
    """The micro-batches' gradients, the big batch's and the window's."""

    def __init__(self, left: Residual, indices: Mapping[str, Tensor], parts: Parts) -> None:
        self._left, self._parts, self._loop = left, parts, left.runner.is_loop
        self._sizes, self._limit = left.runner.samples.sizes, 10 * left.tolerance.loose
        self._truth, self._found = take(left.truth, indices), take(left.found, indices)
        alone = take(left.runner.of_parameters_alone(left.off), indices)
        self._alone = alone if any(bool(each.any()) for each in alone.values()) else None

    def explain(self) -> Diagnosis:
        """Where samples are coupled, weights tell nothing; else compare those that were used with the right ones."""
        taken, right = self._fit(self._found), self._fit(self._truth)
        where = coupling_place(self._left.runner, self._left.off, self._limit)
        if where:
            return Diagnosis([self._of_coupling(where), *self._of_coupled_loop(taken)])
        if right is None:
            return Diagnosis(self._of_several_counts() or self._by_elimination())
        if taken is None:
            return Diagnosis(self._of_clamped(right), right.weights)
        return Diagnosis(list(self._mistakes(taken, right)), right.weights)

    def _fit(self, gradient: Mapping[str, Tensor]) -> Fit | None:
        found = fit(gradient, self._parts, self._alone) or usual_fit(gradient, self._parts, self._sizes)
        return found if found.residual <= self._limit else None

    def _of_coupling(self, where: str) -> Cause:
        found = "when some samples are changed, the gradients of the others change, too: the loss couples samples"
        return cause("coupled-samples", where, found, loop=self._loop)

    def _of_coupled_loop(self, taken: Fit | None) -> list[Cause]:
        """No weights are right for a coupled loss: compare a loop with what it meant, by samples or all alike."""
        number, total = len(self._sizes), sum(self._sizes)
        meant = (tuple(size / total for size in self._sizes), (1 / number,) * number)
        every = [list(self._mistakes(taken, Fit(weights, 0.0, 0.0))) for weights in meant] if taken else [[]]
        return [each for each in min(every, key=len) if each.kind != "wrong-count"]

    def _of_clamped(self, right: Fit) -> list[Cause]:
        """Find the weights of a gradient that was clipped by value, by its elements below the limit."""
        limit = max((float(each.abs().max()) for each in self._found.values() if each.numel()), default=0.0)
        below = {name: each.abs() < limit for name, each in self._found.items()}
        found, alone, *parts = (
            {name: some[name][inside] for name, inside in below.items()} if some is not None else None
            for some in (self._found, self._alone, *self._parts)
        )
        assert found is not None  # noqa: S101 - it was passed
        taken = fit(found, [part for part in parts if part is not None], alone)
        if taken is None or taken.residual > self._limit:
            return []
        text = f"no element of the gradient is beyond {limit:.3g}, where some would be: it was clipped by value"
        clipped = cause("clipping", "clipping by value", text, loop=self._loop, remedy=_BY_HAND)
        return [clipped, *self._mistakes(taken, right)]

    def _of_several_counts(self) -> list[Cause]:
        """No weights of whole micro-batches make the big batch: perhaps each term has its own."""
        left = self._left
        text = "the loss has several terms, averaged over different things, and no one weight per micro-batch fits"
        options = Options(check=False, batch_norm="micro")
        if not isinstance(left.runner.strategy, BigStepStrategy):
            try:
                own = left.runner.accumulated(left.off, BigStepStrategy(max(self._sizes), options))
            except BigBatchError:
                own = None
            if own is not None and left.tolerance.is_negligible(relative(own.gradients, left.truth)):
                found = f"{text}. Weighting each term by its own count, as BigStep does, makes the gradients equal"
                return [cause("wrong-count", OUTSIDE, found, loop=self._loop, count="its own count")]
        fits = {name: fit(self._truth, self._parts, names=[name]) for name in self._truth}
        means = {
            name: each.weights
            for name, each in fits.items()
            if each is not None and each.residual <= self._limit
            if min(each.weights) >= 0 and near(math.fsum(each.weights), 1.0, 1e-3)
        }
        for name, weights in list(means.items())[1:]:
            other, before = next(iter(means.items()))
            if not all(near(a, b, 1e-3) for a, b in zip(weights, before, strict=True)):
                found = (
                    f"{text}: '{other}' adds up by weights of {proportion(before)}, '{name}' by {proportion(weights)}"
                )
                return [cause("wrong-count", OUTSIDE, found, loop=self._loop, count="its own count")]
        return []

    def _by_elimination(self) -> list[Cause]:
        """No weights add up to the big batch's gradient, and nothing in the model explains that."""
        found = fit(self._truth, self._parts, self._alone)
        if self._loop and (found is None or found.residual < _PLAINLY):
            return []
        text = (
            "no weights of whole micro-batches add up to the big batch's gradient, and nothing in the model explains "
            "that: the loss computes something of all samples, such as a mean, a rank or a threshold, perhaps without "
            "gradient"
        )
        return [cause("coupled-samples", OUTSIDE, text, loop=self._loop)]

    def _mistakes(self, taken: Fit, right: Fit) -> Iterator[Cause]:
        """Tell what is wrong with the weights that were used."""
        used, should, number, loop = taken.weights, right.weights, len(taken.weights), self._loop
        out = [i for i in range(number) if is_zero(used[i], used) and not is_zero(should[i], should)]
        kept = [i for i in range(number) if i not in out]
        ratio = taken.ratio(right)
        scale = ratio if ratio is not None else _common_scale(used, should, kept)
        share = math.fsum(should[i] for i in kept) / (math.fsum(should) or 1.0)
        if out and kept:
            yield self._of_dropped(out, kept)
            if near(scale, number / len(kept), 1e-3) or near(scale * share, 1.0, 1e-3):
                scale = 1.0  # an average over those that are left
        counts = _Counts(self._left.runner.samples)
        count = counts.in_proportion_to(should)
        if not near(scale, 1.0, 1e-3):
            yield self._of_scale(scale, right, counts, count)
        if ratio is None:
            found = f"micro-batches were weighted {proportion(used)}; the big batch weights them {proportion(should)}"
            found += f", in proportion to {count}" if count else ""
            yield cause("wrong-count", "", found, loop=loop, count=count)
        if self._alone is not None and not out:
            times, once = (math.fsum(used) + taken.alone) / scale, math.fsum(should) + right.alone
            if not near(times, once, 1e-3):
                yield _of_parameters(times, once, number, loop=loop)

    def _of_dropped(self, out: Sequence[int], kept: Sequence[int]) -> Cause:
        """Some micro-batches do not count: the first may have been cleared away, others never reached the step."""
        first, number = max(out) < min(kept), len(out) + len(kept)
        cleared = self._left.backwards is None or self._left.backwards > len(kept)
        which = listed([str(i + 1) for i in out])
        found = f"micro-batch {which} of {number} has no weight"
        if first and cleared:
            found += ": gradients were cleared inside the window, after it"
            remedy = "Clear gradients once in a window, right after optimizer.step(), not before each backward."
        elif first:
            found += ": its gradient did not come to the step, and nothing was cleared"
            remedy = "Call backward for every micro-batch of the window:  for batch in micro_batches: ..."
        else:
            remedy = (
                "Step after the last micro-batch, too:  if (i + 1) % steps == 0 or i + 1 == len(loader), and divide by "
                "how many there really are; or  for batch in accumulator.over(loader), which drops none."
            )
        where = "zero_grad" if first and cleared else f"micro-batch {which}"
        return cause("dropped-micro-batch", where, found, loop=self._loop, remedy=remedy if self._loop else "")

    def _of_scale(self, scale: float, right: Fit, counts: "_Counts", count: str) -> Cause:
        """All weights are wrong by one factor: which division is missing, or one too many?"""
        number, sums = len(right.weights), all(near(weight, 1.0) for weight in right.weights)
        found, where = f"the gradient is {scale:.4g} times the big batch's", "loss"
        remedy = "Divide by what the window really has: the number of its micro-batches, or better its count."
        other = counts.larger_by(count, 1 / scale) if count else ""
        divisor = number / scale
        if scale < 0:
            found += ": its sign is turned, so a step goes uphill"
            remedy = "Take the minus before the loss out; to climb:  torch.optim.SGD(..., maximize=True)"
        elif near(scale, number, 1e-3) and not sums:
            found += f", once for each of {number} micro-batches: it was not divided"
            remedy = f"Divide before backward:  (loss / {number}).backward(); or weight by count."
        elif near(scale, 1 / number, 1e-3) and sums:
            found += ": a sum was divided"
            remedy = "The loss is a sum, which adds up by itself: remove the division by the number of micro-batches."
        elif near(scale, 1 / number, 1e-3):
            found += ": it was divided by the number of micro-batches twice"
            remedy = "Remove one of the two divisions: the loss's own, or the framework's."
        elif other:
            found += f", as if divided by {counts.total(other):g}, {other}, instead of {counts.total(count):g}, {count}"
            remedy = f"Divide by {count} of all micro-batches of the window."
        elif scale >= _SCALES and near(math.log2(scale), round(math.log2(scale)), 1e-9):
            found, where = f"{found}, a power of two: a loss scale was left in", "scaler"
            remedy = "Unscale before you read or clip gradients:  scaler.unscale_(optimizer)"
        elif near(divisor, round(divisor), 1e-5):  # of many, one is near to anything
            found += f", as if divided by {round(divisor)} instead of {number}"
        elif scale < 1:
            remedy += f" {_BY_HAND}"
        return cause("wrong-scale", where, found, loop=self._loop, remedy=remedy if self._loop else "")


def _of_parameters(times: float, once: float, number: int, *, loop: bool) -> Cause:
    found = f"a term that no sample is in is added {times:.3g} times per window; it should be added {once:.3g} times"
    if abs(times) <= 1e-6 * abs(once):
        found = "a term that no sample is in is added in the big batch, and not in the window"
    elif near(times, number * once, 1e-3):
        found += ": it was added for each micro-batch"
    own = "Say that it counts once in a window:  counted(loss, ...) + counted(penalty, 'once')"
    theirs = "Add it once in a window:  penalty.backward(), outside the loop over micro-batches."
    return cause("wrong-count", "a term of parameters alone", found, loop=loop, remedy=theirs if loop else own)


def _common_scale(used: Sequence[float], should: Sequence[float], kept: Sequence[int]) -> float:
    """Return the factor that all weights together are wrong by, where each is wrong by its own."""
    known = [i for i in kept if not is_zero(should[i], should)]  # what counts nothing does not show its weight
    if known and all(near(used[i], used[known[0]]) for i in known):
        return used[known[0]] * len(used)  # one weight for all: is it 1/n, as a mean has it, or 1, or 1/n twice?
    total = math.fsum(should[i] for i in kept)
    return math.fsum(used[i] for i in kept) / total if total else 1.0


class _Counts:
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
                and all(near(row.get(expression, math.nan) / total, weight / whole) for row, weight in pairs)
            ):
                return expression
        return ""

    def larger_by(self, count: str, factor: float) -> str:
        """Return what comes to so many times a count; nothing where nothing does."""
        wanted = factor * self.total(count)
        return next((each for each in self.rows[0] if each != count and near(self.total(each), wanted)), "")

    @property
    def are_alike(self) -> bool:
        """Whether all micro-batches count the same, whatever is counted."""
        counts = [name for name in self.rows[0] if not name.endswith("!= 0).sum()")]  # 0 may be a class
        return all(row.get(name) == self.rows[0][name] for row in self.rows for name in counts)


def all_alike(samples: Samples) -> bool:
    """Whether all micro-batches count the same, which hides wrong weights."""
    return _Counts(samples).are_alike


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

"""What is left of a difference when the model is not its cause: the loss's own shape, or the weights of a loop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.errors import BigBatchError
from bigbatch.options import Options
from bigbatch.verifying.counting import Counts
from bigbatch.verifying.evidence import cause, listed, proportion
from bigbatch.verifying.gradients import is_finite
from bigbatch.verifying.judging import Compared, Judge
from bigbatch.verifying.looking import OUTSIDE
from bigbatch.verifying.mistakes import BY_HAND, Mistake, mistakes
from bigbatch.verifying.perturbing import Shape, shape_after_model, shape_of_loss
from bigbatch.verifying.places import Places
from bigbatch.verifying.runs import Parts, Runs
from bigbatch.verifying.turning_off import Off
from bigbatch.verifying.verification import Cause
from bigbatch.verifying.ways import OwnWay, Way
from bigbatch.verifying.weights import Fit, clamped, fitted, near, supposed

_OWN = "its own count"
_CLAMP = (
    "Divide by no less than one, inside the loss, since no weight makes a NaN nothing:  "
    "loss.sum() / count.clamp(min=1); then weigh by count:  counted(loss, count)"
)
_BENDS = "the gradients that come back to all others change by one factor: the loss bends the mean of all samples"
_COMPARES = "the gradients that come back to the others change, too: the loss compares samples with each other"


@dataclass(frozen=True)
class Left:
    """A difference that is still there with all else turned off."""

    runs: Runs
    judge: Judge
    off: Off
    compared: Compared
    way: Way
    loop: bool
    before: float  # the difference with nothing turned off
    backwards: int | None = None  # of a loop: how many came to the model

    @property
    def tolerance(self) -> float:
        """How far weights, added up, may miss a gradient."""
        return 10 * self.judge.loose

    @property
    def share(self) -> float:
        """How much of all the difference this is."""
        known = math.isfinite(self.before) and self.before > 0
        return min(1.0, self.compared.overall / self.before) if known else 1.0


class Explained(NamedTuple):
    """What explains it, and the weights that micro-batches should have had, where there are any."""

    causes: list[Cause]
    weights: tuple[float, ...] | None = None


def explained(left: Left) -> Explained:
    """Find out what is wrong with the loss or with the loop."""
    numbers = {name: p.numel() for name, p in left.runs.subject.parameters.items()}
    places = Places.in_gradients(left.compared.truth, numbers)
    parts = left.runs.parts(places, left.off)
    empty = [place for place, each in enumerate(parts.gradients) if not is_finite(each)]
    if empty:
        return Explained([_of_nothing(left, empty, parts)])
    return _Weighing(left, places, parts).explained()


def _of_nothing(left: Left, empty: Sequence[int], parts: Parts) -> Cause:
    which = listed([str(place + 1) for place in empty])
    found = (
        f"micro-batch {which} of {len(parts.losses)} has a loss of {parts.losses[empty[0]]} by itself: nothing in it "
        "is counted, and a mean over nothing is no number"
    )
    return replace(cause("wrong-count", OUTSIDE, 1.0, found, left.loop), remedy=_CLAMP)


class _Weighing:
    """The micro-batches' gradients on one side, the big batch's and the window's on the other."""

    def __init__(self, left: Left, places: Places, parts: Parts) -> None:
        self._left, self._parts = left, parts
        self._sizes = left.runs.samples.sizes
        self._truth, self._found = places.of(left.compared.truth), places.of(left.compared.found)
        alone = places.of(left.runs.past_the_model(left.off))
        self._alone = alone if any(bool(each.any()) for each in alone.values()) else None
        self._by_samples = Fit(tuple(size / sum(self._sizes) for size in self._sizes), 0.0, 0.0)

    def explained(self) -> Explained:
        """Look at the loss's shape first: where samples are coupled, weights tell nothing."""
        left = self._left
        shape = shape_of_loss(left.runs, left.off, left.tolerance)
        taken = self._fit(self._found)
        if shape in {"nonlinear", "coupled"}:
            return Explained(self._of_shape(shape, taken))
        right = self._fit(self._truth)
        if right is None:
            return Explained(self._of_several())
        if taken is None:
            return self._of_clamped(right)
        return Explained(self._of_weights(taken, right), right.weights)

    def _of_weights(self, taken: Fit, right: Fit) -> list[Cause]:
        alone, came = self._alone, self._left.backwards
        wrong = mistakes(taken, right, self._parts.gradients, self._truth, alone, backwards=came)
        return [self._told(each, right) for each in wrong]

    def _of_clamped(self, right: Fit) -> Explained:
        """No weights make the window's gradient: see whether they do where it is below some limit."""
        found = clamped(self._found, self._parts.gradients, self._alone)
        if found is None or found[0].residual > self._left.tolerance:
            return Explained([], right.weights)
        taken, limit = found
        others = self._of_weights(taken, right)
        text = (
            f"no element of the gradient is beyond {limit:.3g}, where some would be: it was clipped by value. Those "
            "below add up" + (" as in the big batch" if not others else "")
        )
        share = self._left.share * (1 - max((each.share for each in others), default=0.0))
        clipping = cause("wrong-scale", "clipping by value", share, text, self._left.loop, how=BY_HAND)
        return Explained([clipping, *others], right.weights)

    def _fit(self, gradient: Mapping[str, Tensor]) -> Fit | None:
        """Return the weights of a gradient, or None where no weights explain it."""
        parts = self._parts.gradients
        found = fitted(gradient, parts, self._alone) or supposed(gradient, parts, self._by_samples.weights, self._sizes)
        return found if found.residual <= self._left.tolerance else None

    def _told(self, wrong: Mistake, right: Fit | None = None) -> Cause:
        found, counts = wrong.found, Counts.of(self._left.runs.samples)
        count = counts.in_proportion_to(right.weights) if right is not None else None
        if wrong.kind == "wrong-count" and count is not None:
            found += f", in proportion to {count}"
        if wrong.kind == "wrong-scale" and count is not None:
            other = counts.larger_by(count, 1 / wrong.scale)
            if other is not None:
                here, there = counts.total(other), counts.total(count)
                found += f", as if divided by {here:g}, {other}, instead of {there:g}, {count}"
                wrong = replace(wrong, remedy=f"Divide by {count} of all micro-batches of the window.")
        said = {"steps": len(self._sizes), "count": count or "count", "how": wrong.remedy}
        return cause(wrong.kind, wrong.where, self._left.share * wrong.share, found, self._left.loop, **said)

    def _of_shape(self, shape: Shape, taken: Fit | None) -> list[Cause]:
        """The loss looks across samples; a loop may have weighed it wrong as well."""
        left = self._left
        model = type(left.runs.subject.models[0]).__name__
        in_loss = left.runs.has_loss_fn and shape_after_model(left.runs, left.off, left.tolerance) == shape
        wrong: list[Mistake] = []
        if taken is not None:
            # No weights are right here: a loop is held to what it meant, by samples or all alike.
            number = len(taken.weights)
            equal = replace(self._by_samples, weights=(1 / number,) * number)
            meant = (
                mistakes(taken, fit, self._parts.gradients, self._truth, backwards=left.backwards)
                for fit in (self._by_samples, equal)
            )
            wrong = [each for each in min(meant, key=len) if each.kind != "wrong-count"]
        own = max(0.0, 1 - max((each.share for each in wrong), default=0.0))
        kind = "nonlinear-in-a-mean" if shape == "nonlinear" else "coupled-samples"
        found = f"when some samples are changed, {_BENDS if shape == 'nonlinear' else _COMPARES}"
        where = OUTSIDE if in_loss else f"{model}.forward"
        return [cause(kind, where, left.share * own, found, left.loop), *(self._told(each) for each in wrong)]

    def _of_several(self) -> list[Cause]:
        """No weights of whole micro-batches make the big batch: the loss has terms that weigh differently."""
        left, unused = self._left, self._unused()
        if unused is not None:
            return [unused]
        if isinstance(left.way, OwnWay):
            return []
        options = Options(check=False, batch_norm="micro")
        try:
            own = left.runs.accumulated(left.off, OwnWay(max(self._sizes), options))
        except BigBatchError:
            return self._of_parameters()
        if not left.judge.gone(Compared.of(own.gradients, left.compared.truth).differences):
            return self._of_parameters()
        found = (
            "the loss has several terms, averaged over different things: no one weight per micro-batch makes them add "
            "up. Weighing each term by its own count, as BigStep does, takes the difference away"
        )
        return [cause("wrong-count", OUTSIDE, left.share, found, left.loop, count=_OWN)]

    def _of_parameters(self) -> list[Cause]:
        """See whether parameters that one term alone reaches add up, each by weights of its own."""
        fits: dict[str, Fit] = {}
        for name in self._truth:
            fit = fitted(self._truth, self._parts.gradients, names=[name])
            if fit is not None and fit.residual <= self._left.tolerance and fit.is_mean():
                fits[name] = fit
        for one, first in fits.items():
            for other, second in fits.items():
                if any(not near(a, b, 1e-3) for a, b in zip(first.weights, second.weights, strict=True)):
                    found = (
                        f"'{one}' adds up by weights of {proportion(first.weights)}, and '{other}' by "
                        f"{proportion(second.weights)}: the loss has terms that are averaged over different things"
                    )
                    return [cause("wrong-count", OUTSIDE, self._left.share, found, self._left.loop, count=_OWN)]
        return []

    def _unused(self) -> Cause | None:
        """Find parameters that only some micro-batches use, and that add up by weights of their own over those."""
        parts, left = self._parts, self._left
        for name, truth in self._truth.items():
            using = [place for place, names in enumerate(parts.used) if name in names]
            size, apart = float(truth.norm()), float((self._found[name] - truth).norm())
            if not using or len(using) == len(parts.used) or apart <= left.judge.loose * size:
                continue
            fit = fitted(self._truth, [parts.gradients[place] for place in using], names=[name])
            if fit is None or fit.residual > left.tolerance:
                continue
            pairs = zip(fit.weights, using, strict=True)
            again = torch.stack([weight * parts.gradients[place][name] for weight, place in pairs]).sum(0)
            rest = float((again - truth).norm())
            found = (
                f"'{name}' is used in micro-batch {listed([str(place + 1) for place in using])} of {len(parts.used)} "
                f"alone. Weighed by {proportion(fit.weights)} there, its difference goes from {apart / size:.2g} to "
                f"{rest / size:.1g}"
            )
            return cause("unused-parameters", name, 1 - rest / apart, found, left.loop)
        return None

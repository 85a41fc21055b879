"""Finds what causes a difference: turns something off, sees what is left, and turns the next thing off.

What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights by
which micro-batches add up. Each thing is a cause if a difference goes away with it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from bigbatch.errors import BigBatchError, CoupledLoss, LossError
from bigbatch.options import Options
from bigbatch.verification.comparison import FAR, Compared, Gap, is_zero, name_of, overall, relative
from bigbatch.verification.model_copy import Gradients, LoopRecord, first_line
from bigbatch.verification.result import OUTSIDE, Cause, cause, listed, number
from bigbatch.verification.runner import Runner
from bigbatch.verification.suspects import LOOKS, NOTHING, OUTPUTS, PLACE, Off, coupling_place, irreproducible_place
from bigbatch.verification.weights import Fit, fit, mistakes, near, proportion, sampled

_ELSEWHERE = 100  # times the residual of a fit: what a fit to other gradients may leave
_BY_CHANCE = 2  # elements of a gradient that are the same
_MORE = 3  # times what the big batch itself loses in a low precision: less may be chance
_LOW = (torch.bfloat16, torch.float16)


class Diagnosis:
    """Looks for the causes of one difference."""

    def __init__(self, runner: Runner, compared: Compared) -> None:
        self._runner, self._tolerance, self._before = runner, compared.tolerance, compared.gap
        self._differences, self._record = compared.differences, compared.window.record
        self._rest = compared.gap  # what is left with all off that was turned off so far

    def causes(self) -> list[Cause]:
        """Find them; in an equal gradient, what the model's own dtype loses."""
        runner, tolerance, record = self._runner, self._tolerance, self._record
        if tolerance.nonlinear:
            far = number(tolerance.nonlinear)
            text = f"twice the loss has not twice the gradient, by {far}: backward is not linear, as where a hook clips"
            return [cause("clipping", "backward", text)]
        if tolerance.repeated:
            text = f"two runs of the same big batch with the same random state differ by {number(tolerance.repeated)}"
            return [cause("nondeterminism", irreproducible_place(runner), text)]
        if all(each.exact for each in self._differences) and (record is None or record.most_steps <= 1):
            return self._lost_in_own_dtype() if runner.dtype == torch.float64 else []
        for dtype in (*_LOW, torch.float32) if tolerance.is_precise and runner.judged_in == torch.float64 else ():
            if all(bool((g.to(dtype).double() == g).all()) for g in self._before.found.values()):
                kept, far = name_of(dtype), number(self._before.overall)
                text = f"in float64, too, the gradient was added up or kept in {kept}, which costs {far}"
                return [cause("precision", f"{kept} gradients", text)]
        return self._by_experiment()

    def _lost_in_own_dtype(self) -> list[Cause]:
        """Compare the own dtype with the same micro-batches added up in float64: what is off may be the sum's."""
        runner, truth, dtype = self._runner, self._before.truth, self._runner.model.dtype
        found = overall({each.name: each.own_difference for each in self._differences})
        floor = overall({each.name: each.own_floor for each in self._differences})
        short, least = name_of(dtype), max(torch.finfo(dtype).eps, overall(self._tolerance.floors))
        said = f"in {short} the gradient is off by {number(found)}, where the big batch's rounding is {number(floor)}"
        if dtype in _LOW and found > max(_MORE * floor, least):
            weights = fit(sampled(truth), list(map(sampled, runner.per_micro_batch()))).weights
            runner.dtype = None
            after = overall(relative(runner.weighted(weights), truth))
            if found > _MORE * after:
                text = f"{said}; the same micro-batches, added up in float64: {number(after)}"
                return [cause("precision", f"{short} gradients", text)]
        text = f"{said}: what runs in {short} is not what runs in float64"
        return [cause("unknown", "", text)] if found > FAR * max(floor, least) else []

    def _by_experiment(self) -> list[Cause]:
        """Find the causes in the loop's steps, in the model, in the weights; `unknown` is what is left."""
        runner = self._runner
        found = [] if self._record is None else list(self._of_loop(self._record))
        found += self._of_model()
        if self._is_gone(self._rest):
            return found
        of_weights = runner.attempt(self._of_weights, list[Cause]())
        if isinstance(runner.refused, CoupledLoss):  # weights that happen to fit are no cause
            text = f"BigStep raises: {first_line(runner.refused).rstrip('.')}"
            of_weights = [each for each in of_weights if each.where] or [cause("coupled-samples", OUTSIDE, text)]
        text = f"with all that is known turned off, a difference of {number(self._rest.overall)} is left"
        return [*found, *(of_weights or [cause("unknown", "", text)])]

    def _of_loop(self, record: LoopRecord) -> Iterator[Cause]:
        """Look at what a loop did to its gradients before they were whole; from here on that has no effect."""
        runner, before = self._runner, self._before
        if runner.clips:
            runner.clips = False
            self._rest = Gap(runner.accumulated().gradients, before.truth)
            if not self._tolerance.is_negligible(relative(self._rest.found, before.found)):  # a norm that is reached
                text = f"gradients were clipped {record.clipped} times in the window; without it, the difference of "
                text += f"{number(before.overall)} is {number(self._rest.overall)}"
                yield cause("clipping", record.clipped_by, text)
        if record.most_steps > 1:
            runner.adds_steps = True
            self._rest = Gap(runner.accumulated().gradients, before.truth)
            text = f"the optimizer stepped {record.most_steps} times in the window"
            text += ": once with the right gradient, and on" if self._is_gone(before) else ""
            yield cause("stepped-inside", "optimizer.step", text, steps=len(runner.sizes))

    def _of_model(self) -> Iterator[Cause]:
        """Turn off what is in the model, one thing after another, until the difference is gone."""
        runner = self._runner
        is_exact = not runner.train_window and not runner.by_samples and runner.options.batch_norm == "exact"
        for look in LOOKS:
            seen = None if self._is_gone(self._rest) else runner.attempt(partial(look, runner), None)
            if seen is None:
                continue
            before, off = self._rest, runner.off
            runner.off |= {seen.kind}
            after = runner.attempt(lambda: Gap(runner.accumulated().gradients, runner.whole().gradients), None)
            if after is None:
                runner.off = off
                continue
            self._rest = after
            added = {name: g - after.found[name] + after.truth[name] for name, g in before.found.items()}
            gone = Gap(added, before.truth)  # the part of the difference that has gone with it
            if not self._is_gone(gone) and not (is_exact and seen.kind == "batch-norm"):
                text = f"{seen.evidence}; turned off, a difference of {number(gone.overall)} goes away"
                where = listed(list(map(runner.model.called, seen.names)))
                yield cause(seen.kind, where, text, first=seen.names[0])

    def _is_gone(self, gap: Gap) -> bool:
        return self._tolerance.is_negligible(gap.differences)

    def _of_weights(self) -> list[Cause]:
        """Return what explains the rest of the difference: the terms of the loss, or the weights of a loop."""
        runner, limit = self._runner, 10 * self._tolerance.loose
        each = list(runner.per_micro_batch())
        parts = list(map(sampled, each))
        if empty := [str(place) for place, part in enumerate(parts, 1) if not part.isfinite().all()]:
            text = f"micro-batch {listed(empty)} of {len(parts)} has no finite gradient: a mean over nothing"
            return [cause("wrong-count", OUTSIDE, text, count="count.clamp(min=1)")]
        alone = self._of_parameters_alone()
        used, right = (fit(sampled(side), parts, alone) for side in (self._rest.found, self._rest.truth))
        if right.residual <= limit and self._hold_elsewhere(right, _ELSEWHERE * limit):
            fits = used.residual <= limit
            return list(mistakes(runner, used, right, has_alone=alone is not None)) if fits else self._of_clamped()
        text = "how micro-batches add up changes with the model's own weights, as for a root or a logarithm of a mean"
        if right.residual > limit:
            if self._has_several_counts(each, limit):
                text = "the loss has several terms, averaged over different things, "
                text += "which no one weight per micro-batch fits"
                return [cause("wrong-count", OUTSIDE, text, count="its own count")]
            text = "no weights of micro-batches add up to the big batch's gradient: samples are compared"
        where = runner.attempt(lambda: coupling_place(runner, self._tolerance.loose), OUTSIDE)
        if where == OUTSIDE and math.isinf(right.residual):
            return []
        by_samples = Fit(tuple(size / runner.batch.size for size in runner.sizes))  # what a loop may have meant
        beside = mistakes(runner, used, by_samples) if used.residual <= limit else ()
        return [cause("coupled-samples", where, text), *beside]

    def _of_parameters_alone(self, also: Off = NOTHING) -> Tensor | None:
        """Return the gradient of terms that no sample is in; None where there are none."""
        try:
            alone = self._runner.whole(also | OUTPUTS).gradients
        except LossError:  # no graph is left
            return None
        return None if is_zero(alone) else sampled(alone)

    def _hold_elsewhere(self, right: Fit, limit: float) -> bool:
        """Whether the right weights are right at other weights of the model, too: where they are counts, they are."""
        truth, alone = sampled(self._runner.whole(PLACE).gradients), self._of_parameters_alone(PLACE)
        found = sampled(self._runner.weighted(right.weights, PLACE))
        found = found if alone is None else found + right.alone * alone
        return not float((found - truth).norm()) > limit * float(truth.norm())

    def _has_several_counts(self, each: Sequence[Gradients], limit: float) -> bool:
        """Whether each term of the loss has its own count: BigStep reads them, or parameters show them apart."""
        truth = self._rest.truth
        with suppress(BigBatchError):
            own = self._runner.by_big_step(Options(check=False, batch_norm="micro")).gradients
            if self._tolerance.is_negligible(relative(own, truth)):
                return True
        of_each = [fit(sampled({name: g}), [sampled({name: part[name]}) for part in each]) for name, g in truth.items()]
        means = [one.weights for one in of_each if one.residual <= limit and near(sum(one.weights), 1.0, 1e-3)]
        return len({proportion(weights) for weights in means if min(weights) >= 0}) > 1

    def _of_clamped(self) -> list[Cause]:
        """A gradient that was clipped by value has many elements of one size, and none that are larger."""
        sizes = sampled(self._rest.found).abs()
        limit, there = float(sizes.max()), int((sizes == sizes.max()).sum())
        text = f"no element of the gradient is beyond {limit:.3g}, which {there} are at: it was clipped by value"
        return [cause("clipping", "clipping by value", text)] if there > _BY_CHANCE and limit else []

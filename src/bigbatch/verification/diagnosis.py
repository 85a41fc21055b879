"""Finds what causes a difference: turns something off, sees what is left, and turns the next thing off.

What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights by
which micro-batches add up. Each thing is a cause if a difference goes away with it.
"""

from dataclasses import replace
from functools import partial

import torch

from bigbatch.errors import CoupledLoss
from bigbatch.verification.comparison import Compared, name_of
from bigbatch.verification.loop_recorder import LoopRecord
from bigbatch.verification.result import OUTSIDE, Cause, cause, listed, number
from bigbatch.verification.runner import Runner, first_line
from bigbatch.verification.suspects import (
    coupling_place,
    irreproducible_place,
    random_numbers,
    training_norms,
    written_state,
)
from bigbatch.verification.switches import NOTHING, Off
from bigbatch.verification.tolerance import FAR, Comparison, overall, relative
from bigbatch.verification.weights import Weights, fit, sampled

_MORE = 3  # times what the big batch itself loses in a low precision: less may be chance
_LOW = (torch.bfloat16, torch.float16)


class Diagnosis:
    """Looks for the causes of one difference."""

    def __init__(self, runner: Runner, compared: Compared) -> None:
        """Turn nothing off yet."""
        self._runner, self._tolerance, self._before = runner, compared.tolerance, compared.gap
        self._differences, self._record = compared.differences, compared.window.record
        self._strategy = runner.strategy

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
            runner.dtype = torch.float64
            if found > _MORE * after:
                text = f"{said}; the same micro-batches, added up in float64: {number(after)}"
                return [cause("precision", f"{short} gradients", text)]
        text = f"{said}: what runs in {short} is not what runs in float64"
        return [cause("unknown", "", text)] if found > FAR * max(floor, least) else []

    def _by_experiment(self) -> list[Cause]:
        """Find the causes in the loop's steps, in the model, in the weights; `unknown` is what is left."""
        runner, tolerance = self._runner, self._tolerance
        found = [] if self._record is None else self._of_loop(self._record)
        off, rest = self._turn_off(found)
        if self._is_gone(rest):
            return found
        place = partial(coupling_place, runner, off, tolerance.loose)
        weights = Weights(runner, tolerance, off, rest, lambda: runner.attempt(place, OUTSIDE))
        of_weights = runner.attempt(weights.explain, list[Cause]())
        if isinstance(runner.refused, CoupledLoss):  # weights that happen to fit are no cause
            text = f"BigStep raises: {first_line(runner.refused).rstrip('.')}"
            of_weights = [each for each in of_weights if each.where] or [cause("coupled-samples", OUTSIDE, text)]
        if not of_weights:
            text = f"with all that is known turned off, a difference of {number(rest.overall)} is left"
            of_weights = [cause("unknown", "", text)]
        return [*found, *of_weights]

    def _turn_off(self, found: list[Cause]) -> tuple[Off, Comparison]:
        """Turn off what is in the model, one thing after another, until the difference is gone; add the causes."""
        runner, off, rest = self._runner, NOTHING, self._compared(NOTHING)
        is_exact = self._strategy.name == "BigStep" and self._strategy.options.batch_norm == "exact"
        for look in (random_numbers, written_state, training_norms):
            seen = None if self._is_gone(rest) else runner.attempt(partial(look, runner), None)
            after = None if seen is None else runner.attempt(partial(self._compared, off | {seen.kind}), None)
            if seen is None or after is None:
                continue
            added = {name: g - after.found[name] + after.truth[name] for name, g in rest.found.items()}
            gone = Comparison(added, rest.truth)  # the part of the difference that has gone with it
            if not self._is_gone(gone) and not (is_exact and seen.kind == "batch-norm"):
                text = f"{seen.evidence}; turned off, a difference of {number(gone.overall)} goes away"
                where = listed(list(map(runner.model.called, seen.names)))
                found.append(cause(seen.kind, where, text, first=seen.names[0]))
            off, rest = off | {seen.kind}, after
        return off, rest

    def _is_gone(self, compared: Comparison) -> bool:
        return self._tolerance.is_negligible(compared.differences)

    def _compared(self, off: Off) -> Comparison:
        """Run both sides with something turned off."""
        if not off and self._strategy is self._runner.strategy:
            return self._before
        found = self._runner.accumulated(off, self._strategy).gradients
        return Comparison(found, self._runner.whole(off).gradients)

    def _of_loop(self, record: LoopRecord) -> list[Cause]:
        """Look at what a loop did to its gradients before they were whole; from here on that has no effect."""
        found, before = list[Cause](), self._before
        if self._strategy.clips:
            self._strategy = replace(self._strategy, clips=False)
            after = self._compared(NOTHING)
            if not self._tolerance.is_negligible(relative(after.found, before.found)):  # a norm that is reached
                text = f"gradients were clipped {record.clipped} times in the window; without it, the difference of "
                text += f"{number(before.overall)} is {number(after.overall)}"
                found.append(cause("clipping", record.clipped_by, text))
        if record.most_steps > 1:
            self._strategy = replace(self._strategy, adds_steps=True)
            text = f"the optimizer stepped {record.most_steps} times in the window"
            text += ": once with the right gradient, and on" if self._is_gone(before) else ""
            found.append(cause("stepped-inside", "optimizer.step", text, steps=len(self._runner.sizes)))
        return found

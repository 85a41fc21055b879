"""Finds what causes a difference: turns something off, sees what is left, and turns the next thing off.

What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights by
which micro-batches add up. Each thing is a cause if it makes a difference where it alone is turned on.
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
    Suspect,
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
            text = f"half the gradient of twice the loss differs from the big batch's by {number(tolerance.nonlinear)}"
            text += ", since something in backward is not linear, such as a hook that clips each micro-batch's gradient"
            return [cause("clipping", "backward", text)]
        if tolerance.repeated:
            text = f"two runs of the same big batch with the same random state differ by {number(tolerance.repeated)}"
            return [cause("nondeterminism", irreproducible_place(runner), text)]
        if all(each.exact for each in self._differences) and (record is None or record.most_steps <= 1):
            return self._lost_in_own_dtype() if runner.dtype == torch.float64 else []
        for dtype in (*_LOW, torch.float32) if tolerance.is_precise and runner.judged_in == torch.float64 else ():
            if all(bool((g.to(dtype).double() == g).all()) for g in self._before.found.values()):
                kept, far = name_of(dtype), number(self._before.overall)
                text = f"every element of the gradient is a {kept} number, though the model ran in float64: it was "
                text += f"added up or kept in {kept}, which costs {far}"
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
        suspects, off, rest = self._suspects()
        is_exact = self._strategy.name == "BigStep" and self._strategy.options.batch_norm == "exact"
        for each in suspects:
            on = runner.attempt(partial(self._compared, off - each.off), None)
            if on is None or (is_exact and each.kind == "batch-norm"):
                continue
            added = {name: g - rest.found[name] + rest.truth[name] for name, g in on.found.items()}
            alone = Comparison(added, on.truth)  # what turning it on adds to the difference that is left
            if not self._is_gone(alone):
                text = f"{each.evidence}; with all else turned off, that makes a difference of {number(alone.overall)}"
                where = listed(list(map(runner.model.called, each.names)))
                found.append(cause(each.kind, where, text, first=each.names[0]))
        if self._is_gone(rest):
            return found
        place = partial(coupling_place, runner, off, tolerance.loose)
        weights = Weights(runner, tolerance, off, rest, lambda: runner.attempt(place, OUTSIDE))
        of_weights = runner.attempt(weights.explain, list[Cause]())
        if isinstance(runner.refused, CoupledLoss):  # weights that happen to fit are no cause
            text = f"BigStep raises: {first_line(runner.refused).rstrip('.')}"
            of_weights = [each for each in of_weights if each.where] or [cause("coupled-samples", OUTSIDE, text)]
        if not of_weights:
            beside = "with all of these turned off" if found else "whatever is turned off"
            text = f"{beside}, a difference of {number(rest.overall)} is left, and no experiment explains it"
            of_weights = [cause("unknown", "", text)]
        return [*found, *of_weights]

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
                text = f"gradients were clipped {record.clipped} times in the window; without it the difference goes "
                text += f"from {number(before.overall)} to {number(after.overall)}"
                found.append(cause("clipping", record.clipped_by, text))
        if record.most_steps > 1:
            self._strategy = replace(self._strategy, adds_steps=True)
            text = f"the optimizer stepped {record.most_steps} times in the window"
            text += ": once with the right gradient, and on" if self._is_gone(before) else ""
            found.append(cause("stepped-inside", "optimizer.step", text, steps=len(self._runner.sizes)))
        return found

    def _suspects(self) -> tuple[list[Suspect], Off, Comparison]:
        """Turn off what is in the model, one thing after the other, until the difference is gone."""
        runner, found, off, rest = self._runner, list[Suspect](), NOTHING, self._compared(NOTHING)
        for look in (random_numbers, written_state, training_norms):
            seen = None if self._is_gone(rest) else runner.attempt(partial(look, runner), None)
            compared = None if seen is None else runner.attempt(partial(self._compared, off | seen.off), None)
            if seen is not None and compared is not None:
                off, rest = off | seen.off, compared
                found.append(seen)
        return found, off, rest

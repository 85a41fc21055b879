"""Finds what causes a difference: turns something off, sees what is left, and turns the next thing off.

What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights by
which micro-batches add up. Each thing is a cause if it makes a difference where it alone is turned on.
"""

from dataclasses import replace
from functools import partial

from bigbatch.errors import CoupledLoss
from bigbatch.verification.loop_recorder import LoopRecord
from bigbatch.verification.result import Cause, listed, number
from bigbatch.verification.runner import Runner, first_line
from bigbatch.verification.suspects import (
    OUTSIDE,
    Suspect,
    random_numbers,
    training_norms,
    written_state,
)
from bigbatch.verification.switches import NOTHING, Off
from bigbatch.verification.tolerance import Comparison, Tolerance, relative
from bigbatch.verification.weights import Weights


class Diagnosis:
    """Looks for the causes of one difference."""

    def __init__(self, runner: Runner, tolerance: Tolerance, before: Comparison) -> None:
        """Turn nothing off yet."""
        self._runner, self._tolerance, self._before = runner, tolerance, before
        self._strategy = runner.strategy

    def causes(self, record: LoopRecord | None) -> list[Cause]:
        """Find them: those of the loop's steps, of the model, of the weights; `unknown` is what is left."""
        runner = self._runner
        found = [] if record is None else self._of_loop(record)
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
                where = listed([name or type(runner.model.own.models[0]).__name__ for name in each.names])
                found.append(runner.cause(each.kind, where, text, first=each.names[0]))
        if self._is_gone(rest):
            return found
        of_weights = runner.attempt(Weights(runner, self._tolerance, off, rest).explain, list[Cause]())
        if isinstance(runner.refused, CoupledLoss):  # weights that happen to fit are no cause
            text = f"BigStep raises: {first_line(runner.refused).rstrip('.')}"
            coupled = runner.cause("coupled-samples", OUTSIDE, text)
            of_weights = [each for each in of_weights if each.where] or [coupled]
        if not of_weights:
            beside = "with all of these turned off" if found else "whatever is turned off"
            text = f"{beside}, a difference of {number(rest.overall)} is left, and no experiment explains it"
            found.append(runner.cause("unknown", "", text))
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
        runner, found, before = self._runner, [], self._before
        if self._strategy.clips:
            self._strategy = replace(self._strategy, clips=False)
            after = self._compared(NOTHING)
            if not self._tolerance.is_negligible(relative(after.found, before.found)):  # a norm that is reached
                text = f"gradients were clipped {record.clipped} times in the window; without it the difference goes "
                text += f"from {number(before.overall)} to {number(after.overall)}"
                found.append(runner.cause("clipping", record.clipped_by, text))
        if record.most_steps > 1:
            self._strategy = replace(self._strategy, adds_steps=True)
            text = f"the optimizer stepped {record.most_steps} times in the window"
            text += ": once with the right gradient, and on" if self._is_gone(before) else ""
            found.append(runner.cause("stepped-inside", "optimizer.step", text, steps=len(runner.sizes)))
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

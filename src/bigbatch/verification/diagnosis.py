"""Finds the causes of a difference: turn something off, see what is left, and turn the next thing off.

What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights by
which micro-batches add up. Each thing is a cause if the difference comes back when it alone is turned on.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bigbatch.verification.loop_recorder import LoopRecord
from bigbatch.verification.result import Cause, listed, number
from bigbatch.verification.runner import Runner, Strategy
from bigbatch.verification.suspects import Suspect, coupling_modules, random_numbers, training_norms, written_state
from bigbatch.verification.switches import NOTHING, Off, without
from bigbatch.verification.tolerance import Comparison, Tolerance, relative
from bigbatch.verification.weights import Weights

_ROUNDS = 16  # of looking for modules that couple samples: one hides those behind it
_ASKED = (
    "The loss uses all samples already; check what it does with them. Rows of own samples begin at across.offset(). "
    "across.sum(x) adds up sums, across.mean(x) averages means over samples, across.mean(x, count) those over other "
    "things (docs/coupled.md)."
)


class Diagnose:
    """Looks for the causes of one difference."""

    def __init__(self, runner: Runner, tolerance: Tolerance, before: Comparison) -> None:
        """Keep the difference; nothing is turned off yet."""
        self._runner, self._tolerance, self._before = runner, tolerance, before
        self._strategy = runner.strategy

    def causes(self, record: LoopRecord | None) -> list[Cause]:
        """Find them: those of the loop's steps, of the model, of the weights; `unknown` is what is left."""
        runner = self._runner
        found = self._of_loop(record) if record is not None else []
        accused, off, rest = self._suspects()
        of_weights, weights = list[Cause](), tuple[float, ...]()
        right = self._strategy if self._is_gone(rest) else None
        if right is None:
            backwards = record.backwards if record is not None else None
            of_weights, weights = runner.attempt(
                lambda: Weights(runner, self._tolerance, off, rest, backwards).explain(), (of_weights, weights)
            )
        for each in accused:
            alone = runner.attempt(partial(self._alone, each, off, right, weights), None)
            if alone is not None:
                text = f"{each.evidence}; with all else turned off, that makes a difference of {number(alone)}"
                where = listed([name or type(runner.model.own.models[0]).__name__ for name in each.names])
                found.append(runner.cause(each.kind, where, text, first=each.names[0]))
        if right is None and not of_weights:
            beside = "with all of these turned off" if found else "whatever is turned off"
            text = f"{beside}, a difference of {number(rest.overall)} is left, and no experiment explains it"
            found.append(runner.cause("unknown", "", text))
        if runner.uses_across and not runner.is_loop:  # a loss that uses all samples is not advised to
            of_weights = [replace(each, kind="coupled-samples", remedy=_ASKED) for each in of_weights[:1]]
        return [*found, *of_weights]

    def _is_gone(self, compared: Comparison) -> bool:
        return self._tolerance.is_negligible(compared.differences)

    def _compared(self, off: Off, strategy: Strategy | None = None) -> Comparison:
        """Run both sides with something turned off."""
        if not off and strategy is None and self._strategy is self._runner.strategy:
            return self._before
        found = self._runner.accumulated(off, strategy or self._strategy).gradients
        return Comparison.of(found, self._runner.whole(off).gradients)

    def _of_loop(self, record: LoopRecord) -> list[Cause]:
        """Look at what a loop did to its gradients before they were whole; from here on that has no effect."""
        runner, found, before = self._runner, [], self._before
        if self._strategy.clipping:
            self._strategy = replace(self._strategy, clipping=False)
            without_it = self._compared(NOTHING)
            text = (
                f"gradients were clipped {record.clipped} times in the window; without it {_goes(before, without_it)}"
            )
            if not self._tolerance.is_negligible(relative(without_it.found, before.found)):  # a norm that is reached
                found.append(runner.cause("clipping", record.clipped_by, text))
            before = without_it
        if record.most_steps > 1:
            self._strategy = replace(self._strategy, stepping=False)
            text = f"the optimizer stepped {record.most_steps} times in the window"
            if self._is_gone(self._before):
                text += ": once with the right gradient, and on"
            else:
                text += f". With the weights held still, {_goes(before, self._compared(NOTHING))}"
            steps = len(runner.samples.sizes)
            found.append(runner.cause("stepped-inside", "optimizer.step", text, steps=steps))
        return found

    def _suspects(self) -> tuple[list[Suspect], Off, Comparison]:
        """Turn off what is in the model, one thing after the other, until the difference is gone."""
        runner, found = self._runner, list[Suspect]()
        off, rest = NOTHING, self._compared(NOTHING)
        looks = [partial(look, runner) for look in (random_numbers, written_state, training_norms)]
        for round_ in range(len(looks) + _ROUNDS):
            coupling = partial(coupling_modules, runner, off, self._tolerance.loose)
            look = looks[round_] if round_ < len(looks) else coupling
            seen = [] if self._is_gone(rest) else runner.attempt(look, list[Suspect]())
            for each in seen:
                compared = runner.attempt(partial(self._compared, {**off, **each.off}), None)
                if compared is not None:
                    off, rest = {**off, **each.off}, compared
                    found.append(each)
            if not seen and look is coupling:
                break
        for each in list(found):  # leave out what is better on: BatchNorm that is exact, or a module that only seemed
            if each.kind in {"batch-norm", "coupled-samples"} and (len(found) > 1 or not self._is_gone(rest)):
                on = self._compared(without(off, each.off))
                if self._is_gone(on) or on.overall < rest.overall / 2:
                    found.remove(each)
                    off, rest = without(off, each.off), on
        return found, off, rest

    def _alone(self, suspect: Suspect, off: Off, right: Strategy | None, weights: Sequence[float]) -> float | None:
        """Return the difference that this makes with all else off and the right weights; None where it makes none."""
        on, runner = without(off, suspect.off), self._runner
        if right is not None:
            found = self._compared(on, right)
        elif weights:
            found = Comparison.of(runner.weighted(weights, on), runner.whole(on).gradients)
        else:  # nobody knows the right weights: see whether it changes anything at all
            found = Comparison.of(runner.whole(on).gradients, runner.whole(off).gradients)
            if self._is_gone(found):
                plain = replace(self._strategy, name="samples")
                found = Comparison.of(*(runner.accumulated(each, plain).gradients for each in (on, off)))
        return None if self._is_gone(found) else found.overall


def _goes(before: Comparison, after: Comparison) -> str:
    return f"the difference goes from {number(before.overall)} to {number(after.overall)}"

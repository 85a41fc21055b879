"""Finds the causes of a difference: turn something off, see what is left, and turn the next thing off.

What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights by
which micro-batches add up. Each thing is a cause if the difference comes back when it alone is turned on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from bigbatch.verification.causes import model as in_model
from bigbatch.verification.causes.model import OUTSIDE, Disabled
from bigbatch.verification.causes.remedies import ASKED, cause, listed
from bigbatch.verification.causes.weights import Diagnosis, Residual, explain
from bigbatch.verification.loop_recorder import LoopRecord
from bigbatch.verification.result import Cause, number
from bigbatch.verification.runner import Runner, Strategy, UserLoop, WeightedLoop, attempt
from bigbatch.verification.tolerance import Gradients, Tolerance, overall, relative

_ROUNDS = 16  # of looking for modules that couple samples: one hides those behind it
_ON = Disabled()


@dataclass(frozen=True)
class Candidate:
    """Something in the model that may be a cause, and what turns it off."""

    kind: str
    off: Disabled
    names: tuple[str, ...]
    evidence: str  # seen before any experiment


@dataclass(frozen=True)
class Comparison:
    """A window's gradients, the big batch's, and how far they differ."""

    found: Gradients
    truth: Gradients
    differences: dict[str, float]

    @classmethod
    def of(cls, found: Gradients, truth: Gradients) -> "Comparison":
        """Measure the differences."""
        return cls(found, truth, relative(found, truth))

    @property
    def overall(self) -> float:
        """One figure for all parameters."""
        return overall(self.differences)


class Diagnose:
    """Looks for the causes of one difference."""

    def __init__(self, runner: Runner, tolerance: Tolerance, before: Comparison, notes: list[str]) -> None:
        """Keep the difference; nothing is turned off yet."""
        self._runner, self._tolerance, self._before, self._notes = runner, tolerance, before, notes
        self._strategy = runner.strategy

    def causes(self, record: LoopRecord | None) -> list[Cause]:
        """Find them: those of the loop's steps, of the model, of the weights; `unknown` is what is left."""
        found = self._of_loop(record) if record is not None else []
        candidates, off, rest = self._candidates()
        later, right = Diagnosis([]), self._strategy if self._is_gone(rest) else None
        if right is None:
            backwards = record.backwards if record is not None else None
            left = Residual(self._runner, self._tolerance, off, rest.truth, rest.found, backwards)
            later = attempt(lambda: explain(left), later, self._notes)
        for each in candidates:
            alone = attempt(partial(self._alone, each, off, right, later.weights), None, self._notes)
            if alone is not None:
                found.append(self._cause(each, alone))
        causes = [*found, *self._with_asked(later.causes)]
        if right is None and not later.causes:
            beside = "with all of these turned off" if causes else "whatever is turned off"
            text = f"{beside}, a difference of {number(rest.overall)} is left, and no experiment explains it"
            causes.append(cause("unknown", "", text, loop=self._runner.is_loop))
        return causes

    def _with_asked(self, causes: list[Cause]) -> list[Cause]:
        """Advise a loss that calls `across` on what to do with all samples."""
        asks = self._runner.uses_across and not self._runner.is_loop
        return [replace(each, kind="coupled-samples", remedy=ASKED) for each in causes[:1]] if asks else causes

    def _is_gone(self, compared: Comparison) -> bool:
        return self._tolerance.is_negligible(compared.differences)

    def _compared(self, off: Disabled, strategy: Strategy | None = None) -> Comparison:
        """Run both sides with something turned off."""
        if off == _ON and strategy is None and self._strategy is self._runner.strategy:
            return self._before
        found = self._runner.accumulated(off, strategy or self._strategy).gradients
        return Comparison.of(found, self._runner.whole(off).gradients)

    def _of_loop(self, record: LoopRecord) -> list[Cause]:
        """Look at what a loop did to its gradients before they were whole; from here on that has no effect."""
        found, before, strategy = [], self._before, self._strategy
        if isinstance(strategy, UserLoop) and strategy.clipping:
            self._strategy = strategy = replace(strategy, clipping=False)
            without = self._compared(_ON)
            text = f"gradients were clipped {record.clipped} times in the window; without it {_goes(before, without)}"
            if not self._tolerance.is_negligible(relative(without.found, before.found)):  # a norm that is reached
                found.append(cause("clipping", record.clipped_by, text, loop=True))
            before = without
        if isinstance(strategy, UserLoop) and record.most_steps > 1:
            self._strategy = replace(strategy, stepping=False)
            text = f"the optimizer stepped {record.most_steps} times in the window"
            if self._is_gone(self._before):
                text += ": once with the right gradient, and on"
            else:
                text += f". With the weights held still, {_goes(before, self._compared(_ON))}"
            steps = len(self._runner.samples.sizes)
            found.append(cause("stepped-inside", "optimizer.step", text, loop=True, steps=steps))
        return found

    def _candidates(self) -> tuple[list[Candidate], Disabled, Comparison]:
        """Turn off what is in the model, one thing after the other, until the difference is gone."""
        found: list[Candidate] = []
        off, rest = _ON, self._compared(_ON)
        looks: list[Callable[[Disabled], list[Candidate]]] = [self._random, self._written, self._norms]
        for look in [*looks, *[self._coupling] * _ROUNDS]:
            if self._is_gone(rest):
                break
            seen = attempt(partial(look, off), list[Candidate](), self._notes)
            if not seen and look == self._coupling:
                break
            for each in seen:
                compared = attempt(partial(self._compared, off | each.off), None, self._notes)
                if compared is not None:
                    off, rest = off | each.off, compared
                    found.append(each)
        for each in list(found):  # leave out what is better on: BatchNorm that is exact, or a module that only seemed
            if each.kind in {"batch-norm", "coupled-samples"} and (len(found) > 1 or not self._is_gone(rest)):
                on = self._compared(off - each.off)
                if self._is_gone(on) or on.overall < rest.overall / 2:
                    found.remove(each)
                    off, rest = off - each.off, on
        return found, off, rest

    def _random(self, _: Disabled) -> list[Candidate]:
        drawn = in_model.random_modules(self._runner)
        by = listed([f"{self._named(name)} ({operation})" for name, operation in drawn.items()])
        evidence = f"random numbers are drawn by {by}"
        return [Candidate("randomness", Disabled(randomness=True), tuple(drawn), evidence)] if drawn else []

    def _written(self, _: Disabled) -> list[Candidate]:
        written = in_model.written_state(self._runner)
        evidence = f"forward writes {listed(list(written))}, which the next micro-batch reads"
        names = tuple(dict.fromkeys(written.values()))
        return [Candidate("state", Disabled(state=True), names, evidence)] if written else []

    def _norms(self, _: Disabled) -> list[Candidate]:
        names = in_model.training_norms(self._runner)
        evidence = f"{listed([self._named(name) for name in names])}: normalized by the samples of the micro-batch"
        return [Candidate("batch-norm", Disabled(statistics=True), names, evidence)] if names else []

    def _coupling(self, off: Disabled) -> list[Candidate]:
        found = []
        for name, layout in in_model.coupling_modules(self._runner, off, self._tolerance.loose).items():
            is_norm = isinstance(self._runner.model.own.modules[name], BatchNorm)
            evidence = f"{self._named(name)} returns something else for a sample when other samples are in its batch"
            kind = "batch-norm" if is_norm else "coupled-samples"
            found.append(Candidate(kind, Disabled(split={name: layout}), (name,), evidence))
        return found

    def _alone(
        self, candidate: Candidate, off: Disabled, right: Strategy | None, weights: Sequence[float] | None
    ) -> float | None:
        """Return the difference that this makes with all else off and the right weights; None where it makes none."""
        on, runner = off - candidate.off, self._runner
        if right is not None:
            found = self._compared(on, right)
        elif weights is not None:
            found = Comparison.of(runner.weighted(weights, on), runner.whole(on).gradients)
        else:  # nobody knows the right weights: see whether it changes anything at all
            found = Comparison.of(runner.whole(on).gradients, runner.whole(off).gradients)
            if self._is_gone(found):
                plain = WeightedLoop()
                found = Comparison.of(*(runner.accumulated(each, plain).gradients for each in (on, off)))
        return None if self._is_gone(found) else found.overall

    def _cause(self, candidate: Candidate, alone: float) -> Cause:
        text = f"{candidate.evidence}; with all else turned off, that makes a difference of {number(alone)}"
        names, model = candidate.names, type(self._runner.model.own.models[0]).__name__
        where = listed([name or model for name in names])
        return cause(candidate.kind, where, text, loop=self._runner.is_loop, first=names[0])

    def _named(self, name: str) -> str:
        """Name a module with its class."""
        if name == OUTSIDE:
            return name
        kind = type(self._runner.model.own.modules[name]).__name__
        return f"{kind} '{name}'" if name else kind


def _goes(before: Comparison, after: Comparison) -> str:
    return f"the difference goes from {number(before.overall)} to {number(after.overall)}"

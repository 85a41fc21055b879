"""Find the causes of a difference: turn something off, see what is left, and turn the next thing off.

What is in the model comes first, since it hides the rest: random numbers, buffers, modules that look across samples.
With all of that off, what is left is the loss's or the loop's, and shows in the weights by which micro-batches add up.
Each thing is a cause if the difference comes back when it alone is on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from bigbatch.verifying import looking
from bigbatch.verifying.apart import Apart
from bigbatch.verifying.evidence import cause, listed
from bigbatch.verifying.gradients import relative
from bigbatch.verifying.judging import Compared, Judge
from bigbatch.verifying.loops import Watched
from bigbatch.verifying.meeting import CHANGES, TURNS, Changed, ChangedWay, as_asked
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.subject import Standing
from bigbatch.verifying.table import number
from bigbatch.verifying.trying import tried
from bigbatch.verifying.turning_off import NOTHING, Off
from bigbatch.verifying.verification import Cause
from bigbatch.verifying.ways import Loop, OwnWay, Plain, Way
from bigbatch.verifying.weighing import Explained, Left, explained

_ROUNDS = 4  # of looking across samples: what is inside of a module hides what the module itself does


@dataclass(frozen=True)
class Candidate:
    """Something in the model that may be a cause, and what turns it off."""

    kind: str
    off: Off
    names: tuple[str, ...]
    told: str  # what was seen, before the experiment


class Inquiry:
    """Looks for the causes of one difference."""

    def __init__(self, runs: Runs, judge: Judge, before: Compared) -> None:
        """Know the difference; nothing is turned off yet."""
        self._runs, self._judge, self._before = runs, judge, before
        self._way = runs.way
        self.unexplained = 0.0  # what is left of the difference when all that was found is off

    @property
    def _of_loop(self) -> bool:
        return isinstance(self._runs.way, Loop)

    def causes(self, watched: Watched | None) -> list[Cause]:
        """Find them, the largest first."""
        found = self._of_stepping(watched)
        candidates, off, rest = self._candidates()
        came = watched.backwards if watched is not None else None
        left = Left(self._runs, self._judge, off, rest, self._way, self._of_loop, self._before.overall, came)
        gone = self._judge.gone(rest.differences)
        right: Way | None = self._way if gone else None
        later, weights = Explained([])
        if not gone and self._asks:
            later, right = self._of_meeting(off, rest)
        if right is None:
            later, weights = tried(lambda: explained(left), Explained([]))
            later = as_asked(later) if self._asks else later
        self.unexplained = 0.0 if gone or later else rest.overall
        alone = [(c, tried(partial(self._alone, c, off, right, weights), None)) for c in candidates]
        confirmed = [(c, each) for c, each in alone if each is not None]
        others = bool(found or later or len(confirmed) > 1)
        found += [self._told(c, each, rest, others=others) for c, each in confirmed]
        return sorted([*found, *later], key=lambda each: -each.share)

    def compared(self, off: Off, way: Way | None = None) -> Compared:
        """Run both with something turned off."""
        if off == NOTHING and way is None and self._way is self._runs.way:
            return self._before
        accumulated = self._runs.accumulated(off, way or self._way)
        return Compared.of(accumulated.gradients, self._runs.whole(off).gradients)

    def _of_stepping(self, watched: Watched | None) -> list[Cause]:
        """See what a loop did to its gradients before they were whole; from here on it does not."""
        found: list[Cause] = []
        if not isinstance(self._way, Loop) or watched is None:
            return found
        before = self._before.overall
        if self._way.clipping:
            self._way = replace(self._way, clipping=False)
            without = self.compared(NOTHING)
            after = without.overall
            said = (
                f"gradients were clipped {watched.clipped.times} times in the window; without it {_goes(before, after)}"
            )
            if not self._judge.gone(relative(without.found, self._before.found)):  # a norm that is reached
                found.append(cause("clipped-inside", watched.clipped.by, _share(before, after), said, loop=True))
            before = after
        if watched.most_steps > 1:
            self._way = replace(self._way, stepping=False)
            after = self.compared(NOTHING).overall
            said = (
                f"the optimizer stepped {watched.most_steps} times in the window. With the weights held still, the "
                f"gradients of all steps together leave a difference of {number(after)} of {number(before)}"
            )
            steps = len(self._runs.samples.sizes)
            share = 1.0 if after >= before else _share(before, after)
            if self._judge.gone(self._before.differences):
                share = 1.0
                said = f"the optimizer stepped {watched.most_steps} times in the window: once with the gradient, and on"
            found.append(cause("stepped-inside", "optimizer.step", share, said, loop=True, steps=steps))
        return found

    @property
    def _norms_meet(self) -> bool:
        """Whether BatchNorm is exact by itself: micro-batches meet there."""
        return isinstance(self._way, OwnWay) and self._way.options.batch_norm == "exact"

    @property
    def _asks(self) -> bool:
        """Whether micro-batches meet where the loss asks for all samples."""
        return isinstance(self._way, OwnWay) and self._runs.asks

    def _of_meeting(self, off: Off, rest: Compared) -> tuple[list[Cause], Way | None]:
        """Change what a loss does with all samples; returns what takes the rest away, and the way with that changed."""
        for changed in CHANGES:
            assert isinstance(self._way, OwnWay)  # noqa: S101 - or nothing meets
            way = ChangedWay(self._way, changed)
            found = tried(partial(self.compared, off, way), None)
            if found is not None and self._judge.gone(found.differences):
                share = rest.overall / self._before.overall if self._before.overall else 1.0
                return [self._of_changed(changed, share, rest.overall, found.overall)], way
        return [], None

    def _of_changed(self, changed: Changed, share: float, before: float, after: float) -> Cause:
        told = cause(changed.kind, changed.where, share, f"{changed.how} {_goes(before, after)}", loop=False)
        return replace(told, remedy=changed.remedy)

    def _candidates(self) -> tuple[list[Candidate], Off, Compared]:
        """Turn off what is in the model, one after the other, until the difference is gone or nothing is left."""
        found: list[Candidate] = []
        off, rest = NOTHING, self.compared(NOTHING)
        for look in (self._random, self._written):
            seen = tried(look, None)
            if seen is not None and not self._judge.gone(rest.differences):
                off, rest = self._tried([seen], found, off, rest)
        seen_before: set[str] = set()
        for _ in range(_ROUNDS):
            if self._judge.gone(rest.differences):
                break
            seen_now = self._looking_across(off, seen_before)
            if not seen_now:
                break
            seen_before.update(each.name for each in seen_now)
            off, rest = self._tried(self._across(seen_now), found, off, rest)
        return self._helping(found, off, rest)

    def _looking_across(self, off: Off, known: set[str]) -> tuple[Apart, ...]:
        return tried(lambda: looking.across_samples(self._runs, off, self._judge.loose, known), ())

    def _tried(
        self, more: Sequence[Candidate], found: list[Candidate], off: Off, rest: Compared
    ) -> tuple[Off, Compared]:
        """Turn more off; what cannot be turned off without an error stays as it is."""
        together = off
        for each in more:
            together = together.and_off(each.off)
        compared = tried(lambda: self.compared(together), None)
        if compared is None:
            for each in more if len(more) > 1 else ():
                off, rest = self._tried([each], found, off, rest)
            return off, rest
        found += more
        return together, compared

    def _helping(self, found: list[Candidate], off: Off, rest: Compared) -> tuple[list[Candidate], Off, Compared]:
        """Leave those out that were better on: a module that only seemed to look across, or that meets the others."""
        kept = list(found)
        for each in found:
            if len(kept) == 1 and self._judge.gone(rest.differences):
                break
            if each.kind in {"batch-norm", "shared-state", "coupled-samples"}:
                other = off.without(each.off)
                on = self.compared(other)
                if self._judge.gone(on.differences) or on.overall < rest.overall / 2:
                    kept.remove(each)
                    off, rest = other, on
        return kept, off, rest

    def _random(self) -> Candidate | None:
        drawn = looking.draws(self._runs)
        names = tuple(drawn)
        by = listed([f"{self._named(name)} ({operation})" for name, operation in drawn.items()])
        return (
            Candidate("randomness", Off(randomness=True), names, f"random numbers are drawn by {by}") if drawn else None
        )

    def _written(self) -> Candidate | None:
        written = looking.writes(self._runs)
        names = tuple(dict.fromkeys(written.values()))
        told = f"forward writes {listed(list(written))}, which the next micro-batch reads"
        return Candidate("buffers-written", Off(state=True), names, told) if written else None

    def _across(self, seen: Sequence[Apart]) -> list[Candidate]:
        """Tell BatchNorm, which can rest, from modules of which no more is known than that they look across."""
        modules, names = self._modules(), [each.name for each in seen]
        norms = tuple(n for n in names if isinstance(m := modules[n], BatchNorm) and m.running_mean is not None)
        found = []
        if norms:
            who = listed([self._named(name) for name in norms])
            verb, whom = ("normalise", "them") if len(norms) > 1 else ("normalises", "it")
            told = f"{who} {verb} by the samples in front of {whom}"
            if self._norms_meet:
                told = f"micro-batches take turns at {who}, where they normalise by all samples"
            kind = "shared-state" if self._norms_meet else "batch-norm"
            found.append(Candidate(kind, Off(statistics=True), norms, told))
        for where in (each for each in seen if each.name not in norms):
            name = where.name
            norm = "shared-state" if self._norms_meet else "batch-norm"
            kind = norm if isinstance(modules[name], BatchNorm) else "coupled-samples"
            told = f"{self._named(name)} gives a sample another output when other samples are beside it"
            found.append(Candidate(kind, Off(apart=(where,)), (name,), told))
        return found

    def _alone(
        self, candidate: Candidate, off: Off, right: Way | None, weights: Sequence[float] | None
    ) -> float | None:
        """Return the difference that this makes with all else off, micro-batches weighed as they should be; or None."""
        on = off.without(candidate.off)
        if right is not None:
            found = self.compared(on, right)
        elif candidate.kind == "shared-state":
            return None
        elif weights is not None:
            found = Compared.of(self._runs.weighed(weights, on), self._runs.whole(on).gradients)
        else:  # nobody knows the right weights: see whether it changes anything at all
            found = Compared.of(self._runs.whole(on).gradients, self._runs.whole(off).gradients)
            if self._judge.gone(found.differences):
                plain = Plain()
                before = self._runs.accumulated(off, plain).gradients
                found = Compared.of(self._runs.accumulated(on, plain).gradients, before)
        return None if self._judge.gone(found.differences) else found.overall

    def _told(self, candidate: Candidate, alone: float, rest: Compared, *, others: bool) -> Cause:
        """Say what was found, and how much of the difference goes with it."""
        before = self._before.overall
        after = self.compared(candidate.off).overall if others else rest.overall
        found = f"{candidate.told}; {_HOW[candidate.kind]} {_goes(before, after)}"
        if others:
            found = f"{candidate.told}; by itself, with all else turned off, that makes a difference of {number(alone)}"
        outside = candidate.names == (looking.OUTSIDE,)
        where = looking.OUTSIDE if outside else listed([name or self._class() for name in candidate.names])
        share = _share(before, after)
        first = candidate.names[0]
        return cause(candidate.kind, where, share, found, loop=self._of_loop, first=first, how=TURNS)

    def _named(self, name: str) -> str:
        """Name a module with its class."""
        if name == looking.OUTSIDE:
            return name
        kind = type(self._modules()[name]).__name__
        return f"{kind} '{name}'" if name else kind

    def _class(self) -> str:
        return type(self._modules()[""]).__name__

    def _modules(self) -> dict[str, nn.Module]:
        return Standing(self._runs.subject.model, self._runs.subject.models, {}).modules


_HOW = {
    "randomness": "with every number at its mean",
    "buffers-written": "with the same buffers for every micro-batch",
    "batch-norm": "without it",
    "shared-state": "with these at rest, so that none waits for another,",
    "coupled-samples": "with each micro-batch by itself there, in the big batch, too,",
}


def _goes(before: float, after: float) -> str:
    return f"the difference goes from {number(before)} to {number(after)}"


def _share(before: float, after: float) -> float:
    if not math.isfinite(before):
        return 1.0 if math.isfinite(after) else 0.0
    return 1 - after / before if before else 0.0

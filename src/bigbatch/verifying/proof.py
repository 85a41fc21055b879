"""One proof on samples that fit: run both, compare, and ask for causes where they differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bigbatch.errors import BatchNormError, BigBatchError, CoupledLoss
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verifying.counting import Counts
from bigbatch.verifying.evidence import cause
from bigbatch.verifying.gradients import overall, relative
from bigbatch.verifying.inquiry import Inquiry
from bigbatch.verifying.judging import Compared, Judge, low, measured, repeats
from bigbatch.verifying.looking import OUTSIDE
from bigbatch.verifying.meeting import as_asked, as_turns, tells_of_turns
from bigbatch.verifying.precision import lost_in_some, lost_in_sums, rounded
from bigbatch.verifying.repeating import unlike_itself
from bigbatch.verifying.runs import Runs, Whole
from bigbatch.verifying.samples import uneven
from bigbatch.verifying.settling import Settling
from bigbatch.verifying.subject import has_hooks
from bigbatch.verifying.table import number
from bigbatch.verifying.verification import Cause, Difference, Verification
from bigbatch.verifying.ways import Accumulated, Loop

_PLAINLY = 1e-3  # a difference that no rounding in float32 makes
_FAR = 30  # times what the big batch itself loses in the model's own dtype: no rounding any more
_NO_REFUSAL = frozenset({"randomness", "low-precision-sums"})  # BigStep refuses neither: it meant something else
_OF_WEIGHTS = frozenset({"not-divided", "divided-twice", "wrong-scale", "wrong-count"})  # as coupled samples look, too
_BY_ELIMINATION = (
    "no weights of whole micro-batches add up to the big batch's gradient, and nothing in the model explains that: the "
    "loss computes something of all samples, such as a mean, a rank or a threshold, perhaps without gradient"
)
_BENT = (
    "three times the gradient of a third of the loss differs from the big batch's gradient by {}: something in "
    "backward is not linear, such as a hook that clips, and does to each micro-batch what it should do to their sum"
)


@dataclass(frozen=True)
class _Measured:
    """Both runs in the model's own dtype, and both in the dtype that is judged in: float64, where the model can."""

    own: Whole
    mine: Accumulated
    truth: Whole
    accumulated: Accumulated
    judge: Judge
    apart: float  # how far two runs of the same big batch lie from each other, where that is no rounding
    bent: float  # how far from linear in the loss the gradient is; else 0

    @property
    def compared(self) -> Compared:
        return Compared.of(self.accumulated.gradients, self.truth.gradients)


class Proof:
    """A proof under way."""

    def __init__(self, runs: Runs, samples: int, *, wide: bool = True) -> None:
        """Know how many samples the whole batch has, of which the runs may have a part; not `wide`: without float64."""
        self.runs, self._samples, self._wide = runs, samples, wide
        self.notes: list[str] = []
        self._unexplained = 0.0
        self._astray = False  # in the model's own dtype alone
        self._settling = Settling(runs, self.notes)

    def verification(self) -> Verification:
        """Run all, and say what came out."""
        runs = self.runs
        measured = self._measured()
        compared = measured.compared
        differences = self._differences(measured, compared)
        causes = self._causes(measured, compared, differences)
        exact = all(each.exact for each in differences) and not causes and not self._astray
        if not exact and not causes:
            self.notes.append("No experiment took this difference away: its cause was not found.")
        sizes = measured.accumulated.sizes or runs.samples.sizes
        loop = isinstance(runs.way, Loop)
        # What BigStep weighs it reads in the loss; what across adds up is the loss's own affair.
        if exact and (loop or (runs.asks and len(set(sizes)) == 1)) and Counts.of(runs.samples).alike:
            self.notes.append(_all_alike(sizes, loop=loop))
        return Verification(
            exact=exact,
            differences=tuple(differences),
            causes=tuple(causes),
            samples=self._samples,
            samples_proved=runs.samples.number,
            micro_batches=sizes,
            dtype=_name(runs.subject.dtype),
            loss=(measured.truth.loss, measured.accumulated.loss),
            accumulated_by=runs.way.name,
            unexplained=self._unexplained,
            notes=tuple(self.notes),
        )

    def _measured(self) -> _Measured:
        """Run in the model's own dtype first: what fails there is the user's own."""
        runs, settling = self.runs, self._settling
        runs.dtype = None
        own, mine = settling.whole(), settling.accumulated()
        if runs.autocast is not None:
            own = runs.whole()
        truth, accumulated = own, mine
        if self._wide and runs.subject.dtype != torch.float64:
            runs.dtype, way = torch.float64, runs.way
            try:
                truth, accumulated = runs.whole(), settling.accumulated()
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, BigBatchError):
                    raise
                self._tell_of_own_dtype(error)
                runs.dtype, truth, accumulated = None, own, mine
            if runs.way is not way:  # it was settled anew
                runs.dtype = None
                mine = settling.accumulated()
                runs.dtype = torch.float64
        if not truth.precise:
            self.notes.append(
                "Some of this model computes in less than float64 whatever its weights are, so equality is judged to "
                "the rounding of that."
            )
        judge = measured(runs, truth)
        apart = repeats(runs, truth, judge)
        return _Measured(own, mine, truth, accumulated, judge, apart, 0.0 if apart else judge.bent)

    def _tell_of_own_dtype(self, error: Exception) -> None:
        said = str(error).strip().partition("\n")[0]
        self.notes.append(
            f"This does not run in float64 ({type(error).__name__}: {said}), so it was judged in "
            f"{_name(self.runs.subject.dtype)} alone, where small mistakes may hide in rounding."
        )
        let_go(error)

    def _differences(self, measured: _Measured, compared: Compared) -> list[Difference]:
        runs, floors = self.runs, measured.judge.floors
        if measured.bent:
            floors = {name: min(floor, measured.judge.most) for name, floor in floors.items()}
        shapes = {name: tuple(p.shape) for name, p in runs.subject.parameters.items()}
        if runs.judged_in != torch.float64:
            nothing = dict.fromkeys(shapes, math.nan)
            return _listed(shapes, nothing, nothing, compared.differences, floors)
        if runs.subject.dtype == torch.float64:
            return _listed(shapes, compared.differences, floors, compared.differences, floors)
        truth = measured.truth.gradients
        mine, own = (relative(each.gradients, truth) for each in (measured.mine, measured.own))
        if not measured.judge.precise:  # what computes in float32 rounds as it does, where terms cancel more so
            floors = {name: max(floor, min(own[name], low(runs))) for name, floor in floors.items()}
        return _listed(shapes, compared.differences, floors, mine, own)

    def _causes(self, measured: _Measured, compared: Compared, differences: list[Difference]) -> list[Cause]:
        runs, truth, judge = self.runs, measured.truth, measured.judge
        loop, accumulated = isinstance(runs.way, Loop), measured.accumulated
        causes: list[Cause] = []
        if measured.bent:
            hooked = (f"the gradient hook of '{name}'" for name, p in runs.subject.parameters.items() if has_hooks(p))
            where, found = next(hooked, "backward"), _BENT.format(number(measured.bent))
            return [cause("clipped-inside", where, 1.0, found, loop=loop)]
        apart = measured.apart
        if apart:
            causes.append(unlike_itself(runs, apart, min(1.0, apart / (compared.overall or apart)), loop=loop))
        steps = accumulated.watched.most_steps if accumulated.watched is not None else 0
        if steps > 1 or not all(each.exact for each in differences):
            precise = judge.precise and runs.judged_in == torch.float64
            low = rounded(accumulated.gradients, compared.differences, loop=loop) if precise else []
            causes += low or self._asked(judge, compared, accumulated)
        elif runs.dtype == torch.float64:
            own = {each.name: each.own_difference for each in differences}
            floors = {each.name: each.own_floor for each in differences}
            runs.dtype = None
            causes += lost_in_sums(runs, truth.gradients, own, floors, loop=loop)
            self.notes += [] if causes else lost_in_some(runs, truth.gradients, own, floors)
            runs.dtype = torch.float64
            if not causes:
                self._look_astray(differences)
        refused, differs = self._settling.refused, not all(each.exact for each in differences)
        if refused is not None:
            return self._with_refusal(causes, refused, differs=differs)
        if not causes and not loop and differs and compared.overall > _PLAINLY:
            return [cause("coupled-samples", OUTSIDE, 1.0, _BY_ELIMINATION, loop=False)]
        return causes

    def _with_refusal(self, causes: list[Cause], refused: Exception, *, differs: bool) -> list[Cause]:
        """Tell the causes of what BigStep refuses: what it says of it goes before what they look like."""
        if tells_of_turns(refused):
            return as_turns(causes, refused)
        first, _, instead = str(refused).partition("\n")
        if isinstance(refused, BatchNormError):
            return [replace(each, remedy=instead) if each.kind == "batch-norm" else each for each in causes]
        if isinstance(refused, CoupledLoss) and not self.runs.asks:
            causes = [each for each in causes if each.kind not in _OF_WEIGHTS]
        if not {each.kind for each in causes} <= _NO_REFUSAL:
            return causes
        kind = "coupled-samples" if isinstance(refused, CoupledLoss) else "wrong-count"
        found = f"BigStep refuses this loss: {first.rstrip('.')}"
        told = [cause(kind, OUTSIDE, 1.0 if differs and not causes else 0.0, found, loop=False, count="count")]
        return [*causes, *(as_asked(told) if self.runs.asks else told)]

    def _look_astray(self, differences: list[Difference]) -> None:
        """Rounding in the model's own dtype is as large for both; where it is not, something else runs there."""
        dtype, found = self.runs.subject.dtype, overall(each.own_difference for each in differences)
        # What rounds to few digits inside rounds alike in both dtypes: the other rounding shows that it does.
        floor = max(overall(each.own_floor for each in differences), overall(each.exact_floor for each in differences))
        self._astray = not found <= _FAR * max(floor, torch.finfo(dtype).eps)
        if self._astray:
            self.notes.append(
                f"In {_name(dtype)} the gradient is off by {number(found)}, where the big batch's own is off by "
                f"{number(floor)}: what runs in {_name(dtype)} is not what runs in float64."
            )

    def _asked(self, judge: Judge, compared: Compared, accumulated: Accumulated) -> list[Cause]:
        """Ask for the causes by experiment."""
        inquiry = Inquiry(self.runs, judge, compared)
        causes = inquiry.causes(accumulated.watched)
        self._unexplained = inquiry.unexplained
        if inquiry.unexplained and causes:
            rest = number(inquiry.unexplained)
            self.notes.append(f"With all of these turned off a difference of {rest} is left, unexplained.")
        return causes


def _listed(
    shapes: Mapping[str, tuple[int, ...]],
    exact: Mapping[str, float],
    exact_floors: Mapping[str, float],
    own: Mapping[str, float],
    own_floors: Mapping[str, float],
) -> list[Difference]:
    return [
        Difference(name, shape, exact[name], exact_floors[name], own[name], own_floors[name])
        for name, shape in shapes.items()
    ]


def _all_alike(sizes: Sequence[int], *, loop: bool) -> str:
    """Say what micro-batches that count the same cannot show, and which size would."""
    other = uneven(sum(sizes), sizes[0], even_out=not loop)
    who = "loop" if loop else "loss"
    return f"All {len(sizes):,} micro-batches count the same, which hides a {who} that weighs them wrong." + (
        f" Take a size that does not divide the batch as well:  micro_batch_size={other}" if other is not None else ""
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

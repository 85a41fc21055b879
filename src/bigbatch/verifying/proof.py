"""One proof on samples that fit: run both, compare, and ask for causes where they differ."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from bigbatch.errors import BatchNormError, CoupledLoss, LossError
from bigbatch.micro_steps.survival import is_out_of_memory, let_go
from bigbatch.verifying.evidence import cause
from bigbatch.verifying.gradients import Gradients, is_finite, relative
from bigbatch.verifying.inquiry import Inquiry
from bigbatch.verifying.judging import Compared, Judge, measured, repeats
from bigbatch.verifying.looking import OUTSIDE
from bigbatch.verifying.precision import lost_in_sums, rounded
from bigbatch.verifying.repeating import unlike_itself
from bigbatch.verifying.runs import Runs, Whole
from bigbatch.verifying.table import number
from bigbatch.verifying.verification import Cause, Difference, Verification
from bigbatch.verifying.ways import Accumulated, Loop, OwnWay, Plain


@dataclass
class Proof:
    """A proof under way."""

    runs: Runs
    samples: int  # of the whole batch, of which the runs may have a part
    notes: list[str] = field(default_factory=list)
    refused: Exception | None = None

    def verification(self) -> Verification:
        """Run all, and say what came out."""
        runs = self.runs
        own = self._own()
        truth = self._truth(own)
        judge = measured(runs, truth)
        accumulated = self._accumulated()
        compared = Compared.of(accumulated.gradients, truth.gradients)
        differences = self._differences(own, truth, judge, compared)
        causes = self._causes(truth, judge, compared, accumulated, differences)
        exact = all(each.exact for each in differences) and not causes and self.refused is None
        if not exact and not causes:
            self.notes.append("No experiment took this difference away: its cause was not found.")
        return Verification(
            exact=exact,
            differences=tuple(differences),
            causes=tuple(causes),
            samples=self.samples,
            samples_proved=runs.samples.number,
            micro_batches=accumulated.sizes or runs.samples.sizes,
            dtype=_name(runs.subject.dtype),
            loss=(truth.loss, accumulated.loss),
            notes=tuple(self.notes),
        )

    def _own(self) -> Whole:
        """Run the big batch as it is: what fails here is the user's own."""
        runs = self.runs
        runs.dtype = None
        own = runs.whole()
        if runs.subject.reached() or not _any(own.gradients):
            # The loss does not use the model that it is given, but the one it knows: then it is that one we run on.
            runs.subject.in_place = True
            own = runs.whole()
        if not _any(own.gradients):
            msg = (
                "no parameter of the model got a gradient from loss_fn(model, batch): the loss does not depend on it.\n"
                "Use the model that is passed in:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
            raise LossError(msg)
        if not is_finite(own.gradients) or not math.isfinite(own.loss):
            msg = (
                f"the big batch itself has a loss of {own.loss:g} and a gradient that is not finite: there is nothing "
                "to compare with.\nVerify with samples and weights at which the model trains, as before a first step."
            )
            raise LossError(msg)
        return own

    def _truth(self, own: Whole) -> Whole:
        """Run the big batch in float64, or say that it cannot be had."""
        runs = self.runs
        if runs.subject.dtype == torch.float64:
            return replace(own, precise=True)
        runs.dtype = torch.float64
        try:
            truth = runs.whole()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            said = str(error).strip().partition("\n")[0]
            self.notes.append(
                f"This model does not run in float64 ({type(error).__name__}: {said}), so it was judged in "
                f"{_name(runs.subject.dtype)} alone, where small mistakes may hide in rounding."
            )
            let_go(error)
            runs.dtype = None
            return own
        if not truth.precise:
            self.notes.append(
                "Some of this model computes in less than float64 whatever its weights are, so equality is judged to "
                "the rounding of that."
            )
        return truth

    def _accumulated(self) -> Accumulated:
        """Accumulate; where this library refuses, say so and go on without it."""
        runs = self.runs
        try:
            found = runs.accumulated()
        except (LossError, BatchNormError) as error:
            if not isinstance(runs.way, OwnWay):
                raise
            first = self.refused or error
            how = "each micro-batch weighed by its samples"
            if runs.way.options.check and isinstance(error, CoupledLoss):
                runs.way, how = (
                    replace(runs.way, options=replace(runs.way.options, check=False)),
                    "as it reads the loss",
                )
            else:
                runs.way = Plain()
            self.refused = first
            let_go(error, told=True)
            self.notes[:] = [note for note in self.notes if not note.startswith("BigStep refuses")]
            self.notes.append(
                f"BigStep refuses this: {str(first).partition(chr(10))[0]}\n"
                f"The figures are those of accumulating anyway, {how}."
            )
            return self._accumulated()
        if not isinstance(runs.way, Loop):
            return found
        watched = found.watched
        if not _any(found.gradients) and not runs.subject.in_place:
            runs.subject.in_place = True  # the loop has its own hold of the model
            return self._accumulated()
        if not _any(found.gradients):
            msg = (
                "train_window(model, micro_batches) left no gradient: no optimizer of torch stepped with one, and "
                ".grad is None everywhere.\n"
                "Let it train the model that it is given, and leave the gradients in .grad or step an optimizer:\n"
                "    def train_window(model, micro_batches): ..."
            )
            raise LossError(msg)
        if watched is not None and watched.autocast is not None:
            runs.autocast = watched.autocast
        if watched is not None and watched.clipped > max(1, len(watched.stepped)):
            runs.way = replace(runs.way, clipping=True)
            return runs.accumulated()
        if watched is not None and watched.clipped:
            self.notes.append("The loop clips its gradient; what was compared is the gradient before that.")
        return found

    def _differences(self, own: Whole, truth: Whole, judge: Judge, compared: Compared) -> list[Difference]:
        runs = self.runs
        shapes = {name: tuple(p.shape) for name, p in runs.subject.parameters.items()}
        wide = torch.float64 in {runs.dtype, runs.subject.dtype}
        if not wide:
            nothing = dict.fromkeys(shapes, math.nan)
            return _listed(shapes, nothing, nothing, compared.differences, judge.floors)
        if runs.subject.dtype == torch.float64:
            return _listed(shapes, compared.differences, judge.floors, compared.differences, judge.floors)
        runs.dtype = None
        if runs.autocast is not None:
            own = runs.whole()
        mine = runs.accumulated()
        runs.dtype = torch.float64
        floors = relative(own.gradients, truth.gradients)
        return _listed(shapes, compared.differences, judge.floors, relative(mine.gradients, truth.gradients), floors)

    def _causes(
        self,
        truth: Whole,
        judge: Judge,
        compared: Compared,
        accumulated: Accumulated,
        differences: list[Difference],
    ) -> list[Cause]:
        runs, loop = self.runs, isinstance(self.runs.way, Loop)
        causes: list[Cause] = []
        apart = repeats(runs, truth, judge)
        if apart:
            causes.append(unlike_itself(runs, apart, min(1.0, apart / (compared.overall or apart)), loop=loop))
        equal = all(each.exact for each in differences)
        if not equal:
            precise = judge.precise and torch.float64 in {runs.dtype, runs.subject.dtype}
            low = rounded(accumulated.gradients, compared.differences, loop=loop) if precise else []
            causes += low
            if not low:
                inquiry = Inquiry(runs, judge, compared)
                causes += inquiry.causes(accumulated.watched)
                if inquiry.unexplained and causes:
                    rest = number(inquiry.unexplained)
                    self.notes.append(f"With all of these turned off a difference of {rest} is left, unexplained.")
        elif runs.dtype == torch.float64 and runs.subject.dtype != torch.float64:
            own = {each.name: each.own_difference for each in differences}
            floors = {each.name: each.own_floor for each in differences}
            runs.dtype = None
            causes += lost_in_sums(runs, truth.gradients, own, floors, loop=loop)
            runs.dtype = torch.float64
        if self.refused is not None and not causes:
            kind = "coupled-samples" if isinstance(self.refused, CoupledLoss) else "wrong-count"
            first = str(self.refused).partition("\n")[0].rstrip(".")
            causes.append(cause(kind, OUTSIDE, 0.0, f"BigStep refuses this loss: {first}", loop=False, count="count"))
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


def _any(gradients: Gradients) -> bool:
    return any(gradient is not None for gradient in gradients.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

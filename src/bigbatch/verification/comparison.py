"""Compares a window's gradients with the big batch's, and says what causes the difference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from bigbatch.errors import BatchNormError, BigBatchError, CoupledLoss, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verification.causes.diagnose import Comparison, Diagnose
from bigbatch.verification.causes.precision import irreproducible, kept_in_less, lost_in_sums
from bigbatch.verification.causes.remedies import cause
from bigbatch.verification.causes.weights import all_alike
from bigbatch.verification.loop_recorder import LoopRecord
from bigbatch.verification.model_copy import USE_ARGUMENT, has_gradient_hooks
from bigbatch.verification.result import Cause, Difference, Verification, number
from bigbatch.verification.runner import (
    Accumulated,
    BigStepStrategy,
    Runner,
    UserLoop,
    WeightedLoop,
    Whole,
    uneven_size,
)
from bigbatch.verification.tolerance import EXACT, NOT_ROUNDING, Tolerance, is_finite, overall, relative

_FAR = 30  # times what the big batch itself loses in the model's own dtype: no rounding any more
_OF_WEIGHTS = {("wrong-scale", "loss"), ("wrong-count", ""), ("unknown", "")}  # as coupled samples look, too


@dataclass(frozen=True)
class _Measured:
    """Both sides in the model's own dtype, and in the one that is judged in: float64, where the model can."""

    own_whole: Whole
    own: Accumulated
    truth: Whole
    accumulated: Accumulated
    tolerance: Tolerance
    apart: float  # how far two runs of the same big batch differ, where that is no rounding; else 0
    nonlinear: float  # how far from linear in the loss the gradient is; else 0


@dataclass
class Verifier:
    """One verification, on samples that fit."""

    runner: Runner
    samples: int  # of the whole batch
    wide: bool  # whether to try float64
    notes: list[str]
    refused: BigBatchError | None = None
    is_off_in_own_dtype: bool = field(default=False, init=False)

    def verification(self) -> Verification:
        """Run all, and return what came out."""
        runner, measured = self.runner, self._measured()
        compared = Comparison.of(measured.accumulated.gradients, measured.truth.gradients)
        differences = self._differences(measured, compared)
        causes = self._causes(measured, compared, differences)
        equal = all(each.exact for each in differences) and not causes and not self.is_off_in_own_dtype
        exact = equal and self.refused is None
        sizes = measured.accumulated.sizes or runner.samples.sizes
        # What BigStep weights it reads in the loss; what across adds up is up to the loss.
        if exact and (runner.is_loop or (runner.uses_across and len(set(sizes)) == 1)) and all_alike(runner.samples):
            self.notes.append(_all_alike(sizes, loop=runner.is_loop))
        return Verification(
            exact=exact,
            differences=tuple(differences),
            causes=tuple(causes),
            samples=self.samples,
            samples_proved=runner.samples.batch.size,
            micro_batches=sizes,
            dtype=name_of(runner.model.own.dtype),
            loss=(measured.truth.loss, measured.accumulated.loss),
            accumulated_by=runner.strategy.name,
            refused="" if self.refused is None else _first_line(self.refused),
            notes=tuple(self.notes),
        )

    def _measured(self) -> _Measured:
        """Run in the model's own dtype first: what fails there is the user's own."""
        runner = self.runner
        runner.dtype = None
        own_whole, own = self._whole(), self._accumulated()
        own_whole = own_whole if runner.autocast is None else runner.whole()
        truth, accumulated = own_whole, own
        if self.wide and runner.model.own.dtype != torch.float64:
            runner.dtype, strategy = torch.float64, runner.strategy
            try:
                truth, accumulated = runner.whole(), self._accumulated()
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, BigBatchError):
                    raise
                self.notes.append(
                    f"This does not run in float64 ({type(error).__name__}: {_first_line(error)}), so it was judged in "
                    f"{name_of(runner.model.own.dtype)} alone, where small mistakes may hide in rounding."
                )
                let_go(error)
                runner.dtype = None
            if runner.strategy is not strategy and runner.dtype is not None:  # BigStep raised in float64 alone
                runner.dtype = None
                own = self._accumulated()
                runner.dtype = torch.float64
        if not truth.is_precise:
            self.notes.append(
                "Some of this model computes in less than float64 whatever its weights are, so equality is judged to "
                "the rounding of that."
            )
        tolerance = runner.tolerance(truth)
        apart = self._repeated(truth, tolerance)
        return _Measured(own_whole, own, truth, accumulated, tolerance, apart, 0.0 if apart else tolerance.nonlinear)

    def _whole(self) -> Whole:
        """Run the big batch for the first time."""
        found = self.runner.whole()
        self.runner.model.refuse_reached()
        if all(gradient is None for gradient in found.gradients.values()):
            problem = "no parameter of the model got a gradient from loss_fn(model, batch)."
            raise LossError(problem, fix=USE_ARGUMENT)
        if not is_finite(found.gradients) or not math.isfinite(found.loss):
            problem = f"the big batch itself has a loss of {found.loss:g} and a gradient that is not finite."
            raise LossError(problem, fix="samples and weights at which the model trains, as before a first step")
        return found

    def _accumulated(self) -> Accumulated:
        """Run a window; where BigStep raises, note it and go on with what raises less."""
        runner, strategy = self.runner, self.runner.strategy
        try:
            found = runner.accumulated()
        except Exception as error:
            # What was refused may well fail where it runs all the same.
            ours = isinstance(error, LossError | BatchNormError) or self.refused is not None
            if not ours or not isinstance(strategy, BigStepStrategy) or is_out_of_memory(error):
                raise
            if self.refused is None and isinstance(error, BigBatchError):
                self.refused = error
                self.notes.append(
                    f"BigStep refuses this: {_first_line(error)}\nThe figures are those of accumulating anyway."
                )
            lets = strategy.options.check and isinstance(error, CoupledLoss)
            runner.strategy = strategy.unchecked if lets else WeightedLoop()
            let_go(error, told=True)
            return self._accumulated()
        if isinstance(strategy, BigStepStrategy):
            runner.strategy = strategy.unchecked if strategy.options.check else strategy  # once is enough
        return self._of_loop(found, strategy) if isinstance(strategy, UserLoop) else found

    def _of_loop(self, found: Accumulated, strategy: UserLoop) -> Accumulated:
        """See what a loop did, and run it again with its clipping, where it clips before the gradient is whole."""
        runner, record = self.runner, found.record
        assert record is not None  # noqa: S101 - of a loop
        runner.model.refuse_reached()
        if all(gradient is None for gradient in found.gradients.values()):
            raise _no_gradient(record)
        runner.autocast = record.autocast or runner.autocast
        if strategy.clipping or not record.clipped:
            return found
        if record.clipped > max(1, len(record.stepped)):
            runner.strategy = replace(strategy, clipping=True)
            return runner.accumulated()
        notes = ["The loop clips its gradient; what was compared is the gradient before that."]
        if record.scale_at_clip > 1:
            notes.append(
                f"What it clips is {record.scale_at_clip:g} times the gradient that it steps with: the loss scale is "
                "still in it, so the limit is as many times too low. Unscale first:  scaler.unscale_(optimizer)"
            )
        self.notes += [note for note in notes if note not in self.notes]
        return found

    def _repeated(self, truth: Whole, tolerance: Tolerance) -> float:
        """Return how far a second run of the same big batch is from the first, where that is no rounding; else 0."""
        small = EXACT if tolerance.is_precise else _reordered_sums(self.runner.judged_in)
        if max(tolerance.floors.values(), default=0.0) <= small:
            return 0.0
        apart = max(relative(self.runner.whole().gradients, truth.gradients).values(), default=0.0)
        return apart if apart > small else 0.0

    def _differences(self, measured: _Measured, compared: Comparison) -> list[Difference]:
        runner, floors = self.runner, measured.tolerance.floors
        if measured.nonlinear:
            floors = {name: min(floor, measured.tolerance.largest) for name, floor in floors.items()}
        exact = own = compared.differences
        own_floors = floors
        if runner.judged_in != torch.float64:
            exact = dict.fromkeys(own, math.nan)
        elif runner.model.own.dtype != torch.float64:
            truth = measured.truth.gradients
            own, own_floors = (relative(each.gradients, truth) for each in (measured.own, measured.own_whole))
            if not measured.tolerance.is_precise:  # what computes in float32 rounds as it does, where terms cancel more
                limit = _reordered_sums(runner.judged_in)
                floors = {name: max(floor, min(own_floors[name], limit)) for name, floor in floors.items()}
        return [
            Difference(name, tuple(p.shape), exact[name], floors[name], own[name], own_floors[name])
            for name, p in runner.model.own.parameters.items()
        ]

    def _causes(self, measured: _Measured, compared: Comparison, differences: Sequence[Difference]) -> list[Cause]:
        runner, tolerance, loop = self.runner, measured.tolerance, self.runner.is_loop
        if measured.nonlinear:
            return [_of_hooks(runner, measured.nonlinear)]
        if measured.apart:
            return [irreproducible(runner, measured.apart)]
        record = measured.accumulated.record
        differs = not all(each.exact for each in differences)
        if differs or (record is not None and record.most_steps > 1):
            precise = tolerance.is_precise and runner.judged_in == torch.float64
            low = kept_in_less(measured.accumulated.gradients, compared.overall, loop=loop) if precise else []
            causes = low or Diagnose(runner, tolerance, compared, self.notes).causes(record)
            return self._with_refusal(causes)
        if runner.dtype == torch.float64:
            own = {each.name: each.own_difference for each in differences}
            floors = {each.name: each.own_floor for each in differences}
            runner.dtype = None
            causes = lost_in_sums(runner, measured.truth.gradients, own, floors, self.notes)
            runner.dtype = torch.float64
            if not causes:
                self._compare_own_dtype(own, floors, {each.name: each.exact_floor for each in differences})
            return causes
        return []

    def _with_refusal(self, causes: list[Cause]) -> list[Cause]:
        """Where BigStep has seen that samples are coupled, weights that happen to fit are no cause."""
        if not isinstance(self.refused, CoupledLoss):
            return causes
        kept = [each for each in causes if (each.kind, each.where) not in _OF_WEIGHTS]
        if kept == causes or "coupled-samples" in {each.kind for each in kept}:
            return kept
        return [
            *kept,
            cause("coupled-samples", "loss_fn", f"BigStep raises: {_first_line(self.refused).rstrip('.')}", loop=False),
        ]

    def _compare_own_dtype(
        self, own: Mapping[str, float], floors: Mapping[str, float], exact_floors: Mapping[str, float]
    ) -> None:
        """Rounding in the model's own dtype is as large on both sides; where it is not, something else runs there."""
        dtype = self.runner.model.own.dtype
        found, floor = overall(own), max(overall(floors), overall(exact_floors))
        self.is_off_in_own_dtype = not found <= _FAR * max(floor, torch.finfo(dtype).eps)
        if self.is_off_in_own_dtype:
            self.notes.append(
                f"In {name_of(dtype)} the gradient is off by {number(found)}, where the big batch's own is off by "
                f"{number(floor)}: what runs in {name_of(dtype)} is not what runs in float64."
            )


def _of_hooks(runner: Runner, nonlinear: float) -> Cause:
    hooked = (f"the gradient hook of '{n}'" for n, p in runner.model.own.parameters.items() if has_gradient_hooks(p))
    found = (
        f"three times the gradient of a third of the loss differs from the big batch's by {number(nonlinear)}, "
        "since something in backward is not linear, such as a hook that clips each micro-batch instead of their sum"
    )
    return cause("clipping", next(hooked, "backward"), found, loop=runner.is_loop)


def _no_gradient(record: LoopRecord) -> LossError:
    """Say what a loop without gradients did: clear them, train something else, or nothing."""
    problem = "train_window(model, micro_batches) left no gradient, and no backward came to the model."
    fix = "for batch in micro_batches: loss_fn(model, batch).backward()"
    if record.backwards:
        problem = (
            f"train_window(model, micro_batches) left no gradient: backward came to the model {record.backwards} "
            "times, but .grad is None after it, and no optimizer of torch stepped with it."
        )
        fix = "gradients left in .grad, without zero_grad() at the end, or a step of an optimizer"
    elif record.steps_of_others:
        problem = "train_window(model, micro_batches) left no gradient: its optimizer has no parameter of the model."
        fix = "torch.optim.SGD(model.parameters(), lr=0.1), made in train_window of the model that is passed in"
    return LossError(problem, fix=fix)


def _reordered_sums(judged_in: torch.dtype) -> float:
    """Return how far sums in any order may differ, where some of it runs in less than float64."""
    dtype = torch.float32 if judged_in == torch.float64 else judged_in
    return min(1000 * torch.finfo(dtype).eps, NOT_ROUNDING)


def _all_alike(sizes: Sequence[int], *, loop: bool) -> str:
    """Say what micro-batches that count the same cannot show, and which size would."""
    other = uneven_size(sum(sizes), sizes[0], balanced=not loop)
    who = "loop" if loop else "loss"
    return f"All {len(sizes):,} micro-batches count the same, which hides a {who} that weights them wrong." + (
        f" Take a size that does not divide the batch as well:  micro_batch_size={other}" if other is not None else ""
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    return str(dtype).removeprefix("torch.")

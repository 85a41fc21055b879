"""Compares a window's gradients with the big batch's, for each parameter, and measures how much of it is rounding."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from bigbatch.errors import BatchNormError, BigBatchError, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verification.model_copy import USE_ARGUMENT
from bigbatch.verification.result import Difference
from bigbatch.verification.runner import Accumulated, Runner, first_line
from bigbatch.verification.tolerance import EXACT, FAR, Comparison, Tolerance, is_zero, overall, relative

_NOT_LINEAR = 1e-6  # relative, of the gradient of twice the loss: a power of two is not rounded


class Compared(NamedTuple):
    """Both sides, how far they differ, and what of it is rounding."""

    window: Accumulated
    whole: Accumulated
    gap: Comparison
    tolerance: Tolerance
    differences: tuple[Difference, ...]  # for each parameter, with its rounding


def compare(runner: Runner, *, wide: bool) -> Compared:
    """Run both sides in the model's own dtype first, since what fails there is the user's own; then in float64.

    Args:
        runner: of the samples that fit.
        wide: whether to try float64.
    """
    own_whole, own = _run_whole(runner), _run_window(runner)
    own_whole = own_whole if runner.autocast is None else runner.whole()
    truth, window = own_whole, own
    if wide and runner.model.dtype != torch.float64:
        runner.dtype = torch.float64
        try:
            truth, window = runner.whole(), _run_window(runner)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, BigBatchError):
                raise
            said = f"This does not run in float64 ({type(error).__name__}: {first_line(error)})"
            runner.notes.append(f"{said}, so it was judged in {name_of(runner.model.dtype)} alone.")
            let_go(error)
            runner.dtype = None
    tolerance, gap = _measured_rounding(runner, truth), Comparison(window.gradients, truth.gradients)
    exact, floors = gap.differences, tolerance.floors
    in_own, own_floors = (relative(each.gradients, truth.gradients) for each in (own, own_whole))
    if runner.judged_in != torch.float64 or runner.model.dtype == torch.float64:
        in_own, own_floors = exact, floors
        exact = exact if runner.judged_in == torch.float64 else dict.fromkeys(exact, math.nan)
    elif not tolerance.is_precise:  # what computes in float32 rounds as it does, where terms cancel more
        limit = _reordered_sums(runner)
        floors = {name: max(floor, min(own_floors[name], limit)) for name, floor in floors.items()}
    differences = tuple(
        Difference(name, tuple(p.shape), exact[name], floors[name], in_own[name], own_floors[name])
        for name, p in runner.model.parameters.items()
    )
    return Compared(window, truth, gap, tolerance, differences)


def _run_whole(runner: Runner) -> Accumulated:
    """Run the big batch for the first time."""
    found = runner.whole()
    runner.model.refuse_reached()
    if is_zero(found.gradients):
        raise LossError("no parameter of the model got a gradient from loss_fn(model, batch).", fix=USE_ARGUMENT)
    if not math.isfinite(found.loss) or not all(g.isfinite().all() for g in found.gradients.values()):
        problem = f"the big batch itself has a loss of {found.loss:g} and a gradient that is not finite."
        raise LossError(problem, fix="samples and weights at which the model trains, as before a first step")
    return found


def _run_window(runner: Runner) -> Accumulated:
    """Run a window; where BigStep raises, note it and go on without its check, at last without BigStep."""
    strategy = runner.strategy
    unchecked = replace(strategy, options=replace(strategy.options, check=False))
    try:
        found = runner.accumulated()
    except Exception as error:
        # What was refused may well fail where it runs all the same.
        ours = isinstance(error, LossError | BatchNormError) or runner.refused is not None
        if not ours or strategy.name != "BigStep" or is_out_of_memory(error):
            raise
        if runner.refused is None and isinstance(error, BigBatchError):
            runner.refused, said = error, first_line(error)
            runner.notes.append(f"BigStep refuses this: {said}\nThe figures are those of accumulating anyway.")
        runner.strategy = unchecked if strategy.options.check else replace(strategy, name="samples")
        let_go(error, told=True)
        return _run_window(runner)
    record = found.record
    if record is None:
        runner.strategy = unchecked  # one check is enough
        return found
    runner.model.refuse_reached()
    if is_zero(found.gradients):
        problem = "train_window(model, micro_batches) left no gradient, and no optimizer of torch stepped with one."
        fix = "gradients left in .grad, or an optimizer that train_window makes of the model that is passed in"
        raise LossError(problem, fix=fix)
    runner.autocast = record.autocast or runner.autocast
    if strategy.clips or not record.clipped:
        return found
    if record.clipped > max(1, len(record.stepped)):  # before the gradient is whole: it is compared
        runner.strategy = replace(strategy, clips=True)
        return runner.accumulated()
    runner.notes.append("The loop clips its gradient; what was compared is the gradient before that.")
    return found


def _measured_rounding(runner: Runner, truth: Accumulated) -> Tolerance:
    """Run the big batch in another order, its loss scaled by what no dtype holds exactly."""
    size = runner.batch.size

    def difference(factor: float = 1.0, order: Sequence[int] | None = None) -> dict[str, float]:
        return relative(runner.whole(factor=factor, order=order).gradients, truth.gradients)

    doubled = max(difference(factor=2.0).values())  # a power of two is not rounded
    repeated = max(difference().values()) if doubled > EXACT else 0.0
    nonlinear = doubled if doubled > max(_NOT_LINEAR, FAR * repeated) else 0.0
    order = [*range(1, size, 2), *range(0, size, 2)][::-1]
    scaled = moved = runner.attempt(lambda: difference(1 / 7, order), None)  # a loss may want its own
    if moved is None or overall(moved) > EXACT:  # with dropout another order is more than rounding
        scaled = difference(1 / 3)
        moved = moved if moved is not None and overall(moved) <= FAR * overall(scaled) else scaled
    measured = {name: max(each, moved[name]) for name, each in (scaled or moved).items()}
    tolerance = Tolerance(measured, most=_NOT_LINEAR if nonlinear else math.inf)
    tolerance.nonlinear = nonlinear
    small = EXACT if tolerance.is_precise else _reordered_sums(runner)
    tolerance.repeated = repeated if repeated > small and not nonlinear else 0.0
    if runner.judged_in == torch.float64 and not (tolerance.is_precise or tolerance.repeated or nonlinear):
        runner.notes.append(
            "Some of this model computes in less than float64, so equality is judged to the rounding of that."
        )
    return tolerance


def _reordered_sums(runner: Runner) -> float:
    """Return how far sums in any order may differ, where some of it runs in less than float64."""
    dtype = torch.float32 if runner.judged_in == torch.float64 else runner.judged_in
    return min(1000 * torch.finfo(dtype).eps, 0.05)


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    return str(dtype).removeprefix("torch.")

"""Compares a window's gradients with the big batch's, for each parameter, and measures how much of it is rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from bigbatch.errors import BatchNormError, BigBatchError, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verification.model_copy import USE_ARGUMENT, Gradients, first_line
from bigbatch.verification.result import EXACT, Difference
from bigbatch.verification.runner import Accumulated, Runner

FAR = 30  # times a measured rounding: no rounding any more
_PRECISE = 1e-10  # relative: a model whose rounding is larger computes some of it in less than float64
_LOOSE = 1e-9
_FACTOR = 16  # times the measured rounding, in experiments whose own rounding is not measured
_NOT_LINEAR = 1e-6  # relative, of the gradient of twice the loss: a power of two is not rounded
# A gradient that is zero but for rounding, as of a bias before a softmax, has no size of its own to be relative to.
_SMALL = 1e-2  # of the typical size of an element


def is_zero(gradients: Gradients) -> bool:
    """Whether there is no gradient."""
    return not any(bool(g.any()) for g in gradients.values())


def relative(found: Gradients, truth: Gradients) -> dict[str, float]:
    """Return how far each gradient is from the true one, relative to the size of that one."""
    sizes = {name: float(gradient.norm()) for name, gradient in truth.items()}
    number = sum(gradient.numel() for gradient in truth.values())
    typical = math.sqrt(math.fsum(size**2 for size in sizes.values()) / max(number, 1))
    differences = {}
    for name, gradient in truth.items():
        apart = float((found[name] - gradient).norm())
        size = max(sizes[name], _SMALL * typical * math.sqrt(gradient.numel()))
        differences[name] = 0.0 if apart == 0 else apart / size if size and math.isfinite(apart) else math.inf
    return differences


def overall(differences: Mapping[str, float]) -> float:
    """Return one figure for all parameters, each of which counts the same: the root of their mean square."""
    return math.sqrt(math.fsum(each**2 for each in differences.values()) / max(len(differences), 1))


class Gap:
    """How far a window's gradients are from the big batch's."""

    def __init__(self, found: Gradients, truth: Gradients) -> None:
        self.found, self.truth, self.differences = found, truth, relative(found, truth)
        self.overall = overall(self.differences)


class Tolerance:
    """What rounding explains, for each parameter."""

    def __init__(self, measured: Mapping[str, float], nonlinear: float) -> None:
        most = _NOT_LINEAR if nonlinear else math.inf
        finite = {name: min(each, most) for name, each in measured.items() if math.isfinite(each)}
        typical = median(finite.values()) if finite else 0.0  # by chance two roundings of a parameter may be the same
        self.floors = {name: max(finite.get(name, typical), typical) for name in measured}
        self.is_precise = overall(self.floors) <= _PRECISE  # all of the model computes in float64
        self.nonlinear, self.repeated = nonlinear, 0.0  # how far twice the loss, and a second run, are from the first
        self.loose = max(_LOOSE, _FACTOR * median(self.floors.values()))  # more than rounding in any experiment

    def is_negligible(self, differences: Mapping[str, float]) -> bool:
        """Whether a difference is rounding, in an experiment whose own rounding was not measured."""
        return all(each <= max(self.loose, _FACTOR * self.floors.get(name, 0.0)) for name, each in differences.items())


class Compared(NamedTuple):
    """Both sides, how far they differ, and what of it is rounding."""

    window: Accumulated
    whole: Accumulated
    gap: Gap
    tolerance: Tolerance
    differences: tuple[Difference, ...]  # for each parameter, with its rounding


def compare(runner: Runner, *, wide: bool) -> Compared:
    """Run both sides in the model's own dtype, since what fails there is the user's own; if `wide`, in float64."""
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
    tolerance, gap = _measured_rounding(runner, truth), Gap(window.gradients, truth.gradients)
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
    try:
        found = runner.accumulated()
    except Exception as error:
        # What was refused may well fail where it runs all the same.
        is_refusal = isinstance(error, LossError | BatchNormError) or runner.refused is not None
        if not is_refusal or runner.train_window or runner.by_samples or is_out_of_memory(error):
            raise
        if runner.refused is None and isinstance(error, BigBatchError):
            runner.refused = error
            said = f"BigStep refuses this: {first_line(error)}"
            runner.notes.append(f"{said}\nThe figures are those of accumulating anyway.")
        let_go(error, told=True)
        runner.by_samples = not runner.options.check
        runner.options = replace(runner.options, check=False)
        return _run_window(runner)
    runner.options = replace(runner.options, check=False)  # one check is enough
    if (record := found.record) is None:
        return found
    runner.model.refuse_reached()
    if is_zero(found.gradients):
        problem = "train_window(model, micro_batches) left no gradient, and no optimizer of torch stepped with one."
        fix = "gradients left in .grad, or an optimizer that train_window makes of the model that is passed in"
        raise LossError(problem, fix=fix)
    runner.autocast = record.autocast or runner.autocast
    if runner.clips or not record.clipped:
        return found
    runner.clips = record.clipped > max(1, len(record.stepped))  # before the gradient is whole: it is compared
    if runner.clips:
        return runner.accumulated()
    runner.notes.append("The loop clips its gradient; what was compared is the gradient before that.")
    return found


def _measured_rounding(runner: Runner, truth: Accumulated) -> Tolerance:
    """Run the big batch in another order, its loss scaled by what no dtype holds exactly."""

    def difference(factor: float = 1.0, order: Sequence[int] | None = None) -> dict[str, float]:
        return relative(runner.whole(factor=factor, order=order).gradients, truth.gradients)

    doubled = max(difference(factor=2.0).values())  # a power of two is not rounded
    repeated = max(difference().values()) if doubled > EXACT else 0.0
    nonlinear = doubled if doubled > max(_NOT_LINEAR, FAR * repeated) else 0.0
    order = sorted(range(runner.batch.size), key=lambda at: (at % 2, -at))
    scaled = moved = runner.attempt(lambda: difference(1 / 7, order), None)  # a loss may want its own
    if moved is None or overall(moved) > EXACT:  # with dropout another order is more than rounding
        scaled = difference(1 / 3)
        moved = moved if moved is not None and overall(moved) <= FAR * overall(scaled) else scaled
    tolerance = Tolerance({name: max(each, moved[name]) for name, each in (scaled or moved).items()}, nonlinear)
    small = EXACT if tolerance.is_precise else _reordered_sums(runner)
    tolerance.repeated = repeated if repeated > small and not nonlinear else 0.0
    if runner.judged_in == torch.float64 and not (tolerance.is_precise or tolerance.repeated or nonlinear):
        runner.notes.append("Some of this model computes in less than float64: equality is judged to that rounding.")
    return tolerance


def _reordered_sums(runner: Runner) -> float:
    """Return how far sums in any order may differ, where some of it runs in less than float64."""
    dtype = torch.float32 if runner.judged_in == torch.float64 else runner.judged_in
    return min(1000 * torch.finfo(dtype).eps, 0.05)


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    return str(dtype).removeprefix("torch.")

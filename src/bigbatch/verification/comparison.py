"""Compares a window's gradients with the big batch's, for each parameter, and says how much of it is rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from bigbatch.errors import BatchNormError, BigBatchError, CoupledLoss, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verification.diagnosis import Diagnosis
from bigbatch.verification.model_copy import USE_ARGUMENT
from bigbatch.verification.result import Cause, Difference, Verification, number
from bigbatch.verification.runner import Accumulated, Runner, first_line
from bigbatch.verification.suspects import irreproducible_place
from bigbatch.verification.tolerance import EXACT, Comparison, Tolerance, is_zero, overall, relative
from bigbatch.verification.weights import count_all, fit, sampled

_FAR = 30  # times a measured rounding: no rounding any more
_MORE = 3  # times what the big batch itself loses in a low precision: less may be chance
_NOT_LINEAR = 1e-6  # relative, of the gradient of twice the loss: a power of two is not rounded
_LOW = (torch.bfloat16, torch.float16)


class Verifier:
    """Compares both sides on samples that fit, and has the causes of a difference found."""

    def __init__(self, runner: Runner, *, wide: bool) -> None:
        """Run both sides in the model's own dtype first, since what fails there is the user's own; then in float64.

        Args:
            runner: of the samples that fit.
            wide: whether to try float64.
        """
        self._runner = runner
        own_whole, own = _run_whole(runner), _run_window(runner)
        own_whole = own_whole if runner.autocast is None else runner.whole()
        truth, self._window = own_whole, own
        if wide and runner.model.dtype != torch.float64:
            runner.dtype = torch.float64
            try:
                truth, self._window = runner.whole(), _run_window(runner)
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, BigBatchError):
                    raise
                runner.notes.append(
                    f"This does not run in float64 ({type(error).__name__}: {first_line(error)}), so it was judged in "
                    f"{name_of(runner.model.dtype)} alone, where small mistakes may hide in rounding."
                )
                let_go(error)
                runner.dtype = None
        self._loss = truth.loss, self._window.loss
        self._tolerance = _measured_rounding(runner, truth)
        self._compared = Comparison(self._window.gradients, truth.gradients)
        self._differences = self._judged(*(relative(each.gradients, truth.gradients) for each in (own, own_whole)))

    def verification(self, samples: int) -> Verification:
        """Return the result; `samples` are those of the whole batch."""
        runner, sizes = self._runner, self._window.sizes or self._runner.sizes
        causes = self._causes()
        exact = all(each.exact for each in self._differences) and not causes and runner.refused is None
        if exact and runner.is_loop:
            _note_alike(runner)
        return Verification(
            exact=exact,
            differences=self._differences,
            causes=tuple(causes),
            samples=samples,
            samples_proved=runner.batch.size,
            micro_batches=sizes,
            dtype=name_of(runner.model.dtype),
            loss=self._loss,
            accumulated_by=runner.strategy.name,
            refused="" if runner.refused is None else first_line(runner.refused),
            notes=tuple(dict.fromkeys(runner.notes)),
        )

    def _judged(self, own: Mapping[str, float], own_floors: Mapping[str, float]) -> tuple[Difference, ...]:
        runner, tolerance, exact = self._runner, self._tolerance, self._compared.differences
        floors = tolerance.floors
        if runner.judged_in != torch.float64 or runner.model.dtype == torch.float64:
            own, own_floors = exact, floors
            exact = exact if runner.judged_in == torch.float64 else dict.fromkeys(exact, math.nan)
        elif not tolerance.is_precise:  # what computes in float32 rounds as it does, where terms cancel more
            limit = _reordered_sums(runner)
            floors = {name: max(floor, min(own_floors[name], limit)) for name, floor in floors.items()}
        return tuple(
            Difference(name, tuple(p.shape), exact[name], floors[name], own[name], own_floors[name])
            for name, p in runner.model.own.parameters.items()
        )

    def _causes(self) -> list[Cause]:
        runner, tolerance, compared, record = self._runner, self._tolerance, self._compared, self._window.record
        if tolerance.nonlinear:
            text = f"half the gradient of twice the loss differs from the big batch's by {number(tolerance.nonlinear)}"
            text += ", since something in backward is not linear, such as a hook that clips each micro-batch's gradient"
            return [runner.cause("clipping", "backward", text)]
        if tolerance.repeated:
            text = f"two runs of the same big batch with the same random state differ by {number(tolerance.repeated)}"
            return [runner.cause("nondeterminism", irreproducible_place(runner), text)]
        if all(each.exact for each in self._differences) and (record is None or record.most_steps <= 1):
            return self._lost_in_own_dtype() if runner.dtype == torch.float64 else []
        kept = _kept_in(compared) if tolerance.is_precise and runner.judged_in == torch.float64 else ""
        if kept:
            text = f"every element of the gradient is a {kept} number, though the model ran in float64: it was added "
            text += f"up or kept in {kept}, which costs {number(compared.overall)}"
            return [runner.cause("precision", f"{kept} gradients", text)]
        return Diagnosis(runner, tolerance, compared).causes(record)

    def _lost_in_own_dtype(self) -> list[Cause]:
        """Compare the own dtype with the same micro-batches added up in float64: what is off may be the sum's."""
        runner, differences, truth = self._runner, self._differences, self._compared.truth
        dtype, short = runner.model.dtype, name_of(runner.model.dtype)
        found, floor, exact_floor = (
            overall({each.name: getattr(each, figure) for each in differences})
            for figure in ("own_difference", "own_floor", "exact_floor")
        )
        least = torch.finfo(dtype).eps
        said = f"in {short} the gradient is off by {number(found)}, where the big batch's rounding is {number(floor)}"
        if dtype in _LOW and found > max(_MORE * floor, least):
            weights = fit(sampled(truth), list(map(sampled, runner.per_micro_batch()))).weights
            runner.dtype = None
            after = overall(relative(runner.weighted(weights), truth))
            runner.dtype = torch.float64
            if found > _MORE * after:
                text = f"{said}; the same micro-batches, added up in float64: {number(after)}"
                return [runner.cause("precision", f"{short} gradients", text)]
        text = f"{said}: what runs in {short} is not what runs in float64"
        return [runner.cause("unknown", "", text)] if found > _FAR * max(floor, exact_floor, least) else []


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
    """Run a window; where BigStep raises, note it and go on with what raises less."""
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
            runner.refused = error
            runner.notes.append(
                f"BigStep refuses this: {first_line(error)}\nThe figures are those of accumulating anyway."
            )
        is_check = strategy.options.check and isinstance(error, CoupledLoss)
        runner.strategy = unchecked if is_check else replace(strategy, name="samples")
        let_go(error, told=True)
        return _run_window(runner)
    if found.record is None:
        runner.strategy = unchecked  # one check is enough
        return found
    runner.model.refuse_reached()
    if is_zero(found.gradients):
        problem = "train_window(model, micro_batches) left no gradient, and no optimizer of torch stepped with one."
        fix = "gradients left in .grad, or an optimizer that train_window makes of the model that is passed in"
        raise LossError(problem, fix=fix)
    runner.autocast = found.record.autocast or runner.autocast
    if strategy.clips or not found.record.clipped:
        return found
    if found.record.clipped > max(1, len(found.record.stepped)):  # before the gradient is whole: it is compared
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
    nonlinear = doubled if doubled > max(_NOT_LINEAR, _FAR * repeated) else 0.0
    order = [*range(1, size, 2), *range(0, size, 2)][::-1]
    scaled = moved = runner.attempt(lambda: difference(1 / 7, order), None, noted=False)  # a loss may want its own
    if moved is None or overall(moved) > EXACT:  # with dropout another order is more than rounding
        scaled = difference(1 / 3)
        moved = moved if moved is not None and overall(moved) <= _FAR * overall(scaled) else scaled
    measured = {name: max(each, moved[name]) for name, each in (scaled or moved).items()}
    tolerance = Tolerance(measured, most=_NOT_LINEAR if nonlinear else math.inf)
    tolerance.nonlinear = nonlinear
    small = EXACT if tolerance.is_precise else _reordered_sums(runner)
    tolerance.repeated = repeated if repeated > small and not nonlinear else 0.0
    if runner.judged_in == torch.float64 and not (tolerance.is_precise or tolerance.repeated or nonlinear):
        runner.notes.append(
            "Some of this model computes in less than float64 whatever its weights are, so equality is judged to the "
            "rounding of that."
        )
    return tolerance


def _reordered_sums(runner: Runner) -> float:
    """Return how far sums in any order may differ, where some of it runs in less than float64."""
    dtype = torch.float32 if runner.judged_in == torch.float64 else runner.judged_in
    return min(1000 * torch.finfo(dtype).eps, 0.05)


def _kept_in(compared: Comparison) -> str:
    """Return the smaller dtype that a float64 model's gradients went through: each element is a number of it."""
    for dtype in (*_LOW, torch.float32):
        if all(bool((g.to(dtype).double() == g).all()) for g in compared.found.values()):
            return name_of(dtype)
    return ""


def _note_alike(runner: Runner) -> None:
    """Say what micro-batches that count the same cannot show."""
    counts = (counts for name, counts in count_all(runner).items() if not name.endswith("!= 0).sum()"))  # 0: a class?
    if all(len(set(each)) == 1 for each in counts):
        runner.notes.append(
            f"All {len(runner.sizes):,} micro-batches count the same, which hides a loop that weights them wrong. Take "
            "a micro_batch_size that does not divide the batch as well."
        )


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    return str(dtype).removeprefix("torch.")

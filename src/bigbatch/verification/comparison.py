"""Compares a window's gradients with the big batch's, and finds by experiment what causes the difference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bigbatch.errors import BatchNormError, BigBatchError, CoupledLoss, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verification import suspects
from bigbatch.verification.loop_recorder import LoopRecord
from bigbatch.verification.model_copy import USE_ARGUMENT, has_gradient_hooks
from bigbatch.verification.result import Cause, Difference, Verification, listed, number
from bigbatch.verification.runner import Accumulated, Runner, Strategy, uneven_size
from bigbatch.verification.switches import NOTHING, Off, without
from bigbatch.verification.tolerance import EXACT, Comparison, Tolerance, is_zero, overall, relative
from bigbatch.verification.weights import Weights, count_all, fit, sampled

_FAR = 30  # times what the big batch itself loses in the model's own dtype: no rounding any more
_OTHER_ORDER = 30  # times the rounding of a factor: another order of the samples costs no more, if it is rounding
_MORE = 3  # times what the big batch itself loses in a low precision: less may be chance
_NOT_LINEAR = 1e-6  # relative, of the gradient of twice the loss: a power of two is not rounded
_LOW = (torch.bfloat16, torch.float16)
_OF_WEIGHTS = {("wrong-scale", ""), ("wrong-count", ""), ("unknown", "")}  # as coupled samples look, too
_ROUNDS = 16  # of looking for modules that couple samples: one hides those behind it
_ASKED = (
    "The loss uses all samples already; check what it does with them. Rows of own samples begin at across.offset(). "
    "across.sum(x) adds up sums, across.mean(x) averages means over samples, across.mean(x, count) those over other "
    "things (docs/coupled.md)."
)


@dataclass
class Verifier:
    """One verification, on samples that fit."""

    runner: Runner
    samples: int  # of the whole batch
    wide: bool  # whether to try float64
    refused: BigBatchError | None = None
    _nonlinear: float = 0.0  # how far from linear in the loss the gradient is
    _apart: float = 0.0  # how far two runs of the same big batch differ
    _is_off_in_own_dtype: bool = False

    def verification(self) -> Verification:
        """Run both sides in the model's own dtype first, since what fails there is the user's own; then in float64."""
        runner = self.runner
        own_whole, own = self._whole(), self._accumulated()
        own_whole = own_whole if runner.autocast is None else runner.whole()
        truth, accumulated = own_whole, own
        if self.wide and runner.model.own.dtype != torch.float64:
            runner.dtype = torch.float64
            try:
                truth, accumulated = runner.whole(), self._accumulated()
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, BigBatchError):
                    raise
                runner.note(
                    f"This does not run in float64 ({type(error).__name__}: {_first_line(error)}), so it was judged in "
                    f"{name_of(runner.model.own.dtype)} alone, where small mistakes may hide in rounding."
                )
                let_go(error)
                runner.dtype = None
        tolerance = self._tolerance(truth)
        compared = Comparison(accumulated.gradients, truth.gradients)
        in_own = [relative(each.gradients, truth.gradients) for each in (own, own_whole)]
        differences = self._differences(tolerance, compared.differences, *in_own)
        causes = self._causes(tolerance, compared, differences, accumulated.record)
        equal = all(each.exact for each in differences) and not causes and not self._is_off_in_own_dtype
        exact = equal and self.refused is None
        sizes = accumulated.sizes or runner.samples.sizes
        # What BigStep weights it reads in the loss; what across adds up is up to the loss.
        if exact and (runner.is_loop or (runner.uses_across and len(set(sizes)) == 1)):
            self._note_alike(sizes)
        return Verification(
            exact=exact,
            differences=tuple(differences),
            causes=tuple(causes),
            samples=self.samples,
            samples_proved=runner.samples.batch.size,
            micro_batches=sizes,
            dtype=name_of(runner.model.own.dtype),
            loss=(truth.loss, accumulated.loss),
            accumulated_by=runner.strategy.name,
            refused="" if self.refused is None else _first_line(self.refused),
            notes=tuple(runner.notes),
        )

    def _whole(self) -> Accumulated:
        """Run the big batch for the first time."""
        found = self.runner.whole()
        self.runner.model.refuse_reached()
        if is_zero(found.gradients):
            problem = "no parameter of the model got a gradient from loss_fn(model, batch)."
            raise LossError(problem, fix=USE_ARGUMENT)
        if not math.isfinite(found.loss) or not all(g.isfinite().all() for g in found.gradients.values()):
            problem = f"the big batch itself has a loss of {found.loss:g} and a gradient that is not finite."
            raise LossError(problem, fix="samples and weights at which the model trains, as before a first step")
        return found

    def _accumulated(self) -> Accumulated:
        """Run a window; where BigStep raises, note it and go on with what raises less."""
        runner, strategy = self.runner, self.runner.strategy
        unchecked = replace(strategy, options=replace(strategy.options, check=False))
        try:
            found = runner.accumulated()
        except Exception as error:
            # What was refused may well fail where it runs all the same.
            ours = isinstance(error, LossError | BatchNormError) or self.refused is not None
            if not ours or strategy.name != "BigStep" or is_out_of_memory(error):
                raise
            if self.refused is None and isinstance(error, BigBatchError):
                self.refused = error
                runner.note(
                    f"BigStep refuses this: {_first_line(error)}\nThe figures are those of accumulating anyway."
                )
            is_check = strategy.options.check and isinstance(error, CoupledLoss)
            runner.strategy = unchecked if is_check else replace(strategy, name="samples")
            let_go(error, told=True)
            return self._accumulated()
        if found.record is None:
            runner.strategy = unchecked  # one check is enough
            return found
        runner.model.refuse_reached()
        if is_zero(found.gradients):
            problem = (
                f"train_window(model, micro_batches) left no gradient: {found.record.backwards} backwards came to "
            )
            problem += "the model, and no optimizer of torch stepped its parameters."
            fix = "gradients left in .grad, or an optimizer that train_window makes of the model that is passed in"
            raise LossError(problem, fix=fix)
        runner.autocast = found.record.autocast or runner.autocast
        if strategy.clipping or not found.record.clipped:
            return found
        if found.record.clipped > max(1, len(found.record.stepped)):  # before the gradient is whole: it is compared
            runner.strategy = replace(strategy, clipping=True)
            return runner.accumulated()
        runner.note("The loop clips its gradient; what was compared is the gradient before that.")
        return found

    def _tolerance(self, truth: Accumulated) -> Tolerance:
        """Measure the rounding: run the big batch in another order, its loss scaled by what no dtype holds exactly."""
        runner, size = self.runner, self.runner.samples.batch.size

        def difference(factor: float = 1.0, order: Sequence[int] | None = None) -> dict[str, float]:
            return relative(runner.whole(factor=factor, order=order).gradients, truth.gradients)

        doubled = max(difference(factor=2.0).values())  # a power of two is not rounded
        repeated = max(difference().values()) if doubled > EXACT else 0.0
        self._nonlinear = doubled if doubled > max(_NOT_LINEAR, _FAR * repeated) else 0.0
        order = [*range(1, size, 2), *range(0, size, 2)][::-1]
        scaled = moved = runner.attempt(lambda: difference(1 / 7, order), None, noted=False)  # a loss may want its own
        if moved is None or overall(moved) > EXACT:  # with dropout another order is more than rounding
            scaled = difference(1 / 3)
            moved = moved if moved is not None and overall(moved) <= _OTHER_ORDER * overall(scaled) else scaled
        measured = {name: max(each, moved[name]) for name, each in (scaled or moved).items()}
        tolerance = Tolerance(measured, most=_NOT_LINEAR if self._nonlinear else math.inf)
        small = EXACT if tolerance.is_precise else self._reordered_sums()
        self._apart = repeated if repeated > small and not self._nonlinear else 0.0
        if runner.judged_in == torch.float64 and not (tolerance.is_precise or self._apart or self._nonlinear):
            runner.note(
                "Some of this model computes in less than float64 whatever its weights are, so equality is judged to "
                "the rounding of that."
            )
        return tolerance

    def _reordered_sums(self) -> float:
        """Return how far sums in any order may differ, where some of it runs in less than float64."""
        dtype = torch.float32 if self.runner.judged_in == torch.float64 else self.runner.judged_in
        return min(1000 * torch.finfo(dtype).eps, 0.05)

    def _differences(
        self,
        tolerance: Tolerance,
        judged: Mapping[str, float],
        own: Mapping[str, float],
        own_floors: Mapping[str, float],
    ) -> list[Difference]:
        runner, floors, exact = self.runner, tolerance.floors, judged
        if runner.judged_in != torch.float64:
            exact, own, own_floors = dict.fromkeys(judged, math.nan), judged, floors
        elif runner.model.own.dtype == torch.float64:
            own, own_floors = judged, floors
        elif not tolerance.is_precise:  # what computes in float32 rounds as it does, where terms cancel more
            limit = self._reordered_sums()
            floors = {name: max(floor, min(own_floors[name], limit)) for name, floor in floors.items()}
        return [
            Difference(name, tuple(p.shape), exact[name], floors[name], own[name], own_floors[name])
            for name, p in runner.model.own.parameters.items()
        ]

    def _causes(
        self, tolerance: Tolerance, compared: Comparison, differences: Sequence[Difference], record: LoopRecord | None
    ) -> list[Cause]:
        runner = self.runner
        if self._nonlinear:
            parameters = runner.model.own.parameters.items()
            hooked = (f"the gradient hook of '{name}'" for name, p in parameters if has_gradient_hooks(p))
            text = (
                f"half the gradient of twice the loss differs from the big batch's by {number(self._nonlinear)}, since "
                "something in backward is not linear, such as a hook that clips each micro-batch instead of their sum"
            )
            return [runner.cause("clipping", next(hooked, "backward"), text)]
        if self._apart:
            text = f"two runs of the same big batch with the same random state differ by {number(self._apart)}"
            return [runner.cause("nondeterminism", suspects.irreproducible_place(runner), text)]
        if all(each.exact for each in differences) and (record is None or record.most_steps <= 1):
            return self._lost_in_sums(compared, differences) if runner.dtype == torch.float64 else []
        kept = _kept_in(compared) if tolerance.is_precise and runner.judged_in == torch.float64 else None
        if kept is not None:
            text = (
                f"every element of the gradient is a {kept} number, though the model ran in float64: it was added up "
            )
            text += f"or kept in {kept}, which costs {number(compared.overall)}"
            return [runner.cause("precision", f"{kept} gradients", text)]
        causes = Diagnose(runner, tolerance, compared).causes(record)
        # Where BigStep has seen that samples are coupled, weights that happen to fit are no cause.
        others = [each for each in causes if (each.kind, each.where) not in _OF_WEIGHTS]
        if not isinstance(self.refused, CoupledLoss) or others == causes:
            return causes
        if not any(each.kind == "coupled-samples" for each in others):
            text = f"BigStep raises: {_first_line(self.refused).rstrip('.')}"
            others.append(runner.cause("coupled-samples", "loss_fn", text))
        return others

    def _lost_in_sums(self, compared: Comparison, differences: Sequence[Difference]) -> list[Cause]:
        """Compare the own dtype with the same micro-batches added up in float64: what is off may be the sum's."""
        runner, dtype, short = self.runner, self.runner.model.own.dtype, name_of(self.runner.model.own.dtype)
        found = overall({each.name: each.own_difference for each in differences})
        floor, eps = overall({each.name: each.own_floor for each in differences}), torch.finfo(dtype).eps
        said = f"is off by {number(found)}, where the big batch's own is off by {number(floor)}"
        if dtype in _LOW and found > max(_MORE * floor, eps):
            parts = [sampled(gradients) for _, gradients in runner.per_micro_batch()]
            right = fit(sampled(compared.truth), parts, runner.samples.sizes)
            runner.dtype = None
            after = overall(relative(runner.weighted(right.weights), compared.truth))
            runner.dtype = torch.float64
            if found > _MORE * after:
                text = f"in {short} the gradient {said}; the same micro-batches, added up in float64: {number(after)}"
                return [runner.cause("precision", f"{short} gradients", text)]
        exact_floor = overall({each.name: each.exact_floor for each in differences})
        self._is_off_in_own_dtype = not found <= _FAR * max(floor, exact_floor, eps)
        if self._is_off_in_own_dtype:
            runner.note(f"In {short} the gradient {said}: what runs in {short} is not what runs in float64.")
        return []

    def _note_alike(self, sizes: Sequence[int]) -> None:
        """Say what micro-batches that count the same cannot show, and which size would."""
        counts, loop = count_all(self.runner.samples).items(), self.runner.is_loop
        if all(len(set(each)) == 1 for name, each in counts if not name.endswith("!= 0).sum()")):  # 0 may be a class
            other = uneven_size(sum(sizes), sizes[0], balanced=not loop)
            said = f" Take a size that does not divide the batch as well:  micro_batch_size={other}" if other else ""
            who = f"a {'loop' if loop else 'loss'} that weights them wrong"
            self.runner.note(f"All {len(sizes):,} micro-batches count the same, which hides {who}.{said}")


def _kept_in(compared: Comparison) -> str | None:
    """Return the smaller dtype that a float64 model's gradients went through: each element is a number of it."""
    every = [g for g in compared.found.values() if g.numel()]
    for dtype in (*_LOW, torch.float32):
        if every and all(bool((g.to(dtype).double() == g).all()) for g in every):
            return name_of(dtype)
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    return str(dtype).removeprefix("torch.")


class Diagnose:
    """Looks for the causes of one difference: turn something off, see what is left, and turn the next thing off.

    What is in the model comes first, since it hides the rest. With all of that off, what is left shows in the weights
    by which micro-batches add up. Each thing is a cause if the difference comes back when it alone is turned on.
    """

    def __init__(self, runner: Runner, tolerance: Tolerance, before: Comparison) -> None:
        """Turn nothing off yet."""
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
        return Comparison(found, self._runner.whole(off).gradients)

    def _of_loop(self, record: LoopRecord) -> list[Cause]:
        """Look at what a loop did to its gradients before they were whole; from here on that has no effect."""
        runner, found, before = self._runner, [], self._before
        if self._strategy.clipping:
            self._strategy = replace(self._strategy, clipping=False)
            without_it = self._compared(NOTHING)
            text = f"gradients were clipped {record.clipped} times in the window; without it "
            text += _goes(before, without_it)
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

    def _suspects(self) -> tuple[list[suspects.Suspect], Off, Comparison]:
        """Turn off what is in the model, one thing after the other, until the difference is gone."""
        runner, found = self._runner, list[suspects.Suspect]()
        off, rest = NOTHING, self._compared(NOTHING)
        looks = [
            partial(look, runner) for look in (suspects.random_numbers, suspects.written_state, suspects.training_norms)
        ]
        for round_ in range(len(looks) + _ROUNDS):
            coupling = partial(suspects.coupling_modules, runner, off, self._tolerance.loose)
            look = looks[round_] if round_ < len(looks) else coupling
            seen = [] if self._is_gone(rest) else runner.attempt(look, list[suspects.Suspect]())
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

    def _alone(
        self, suspect: suspects.Suspect, off: Off, right: Strategy | None, weights: Sequence[float]
    ) -> float | None:
        """Return the difference that this makes with all else off and the right weights; None where it makes none."""
        on, runner = without(off, suspect.off), self._runner
        if right is not None:
            found = self._compared(on, right)
        elif weights:
            found = Comparison(runner.weighted(weights, on), runner.whole(on).gradients)
        else:  # nobody knows the right weights: see whether it changes anything at all
            found = Comparison(runner.whole(on).gradients, runner.whole(off).gradients)
            if self._is_gone(found):
                plain = replace(self._strategy, name="samples")
                found = Comparison(*(runner.accumulated(each, plain).gradients for each in (on, off)))
        return None if self._is_gone(found) else found.overall


def _goes(before: Comparison, after: Comparison) -> str:
    return f"the difference goes from {number(before.overall)} to {number(after.overall)}"

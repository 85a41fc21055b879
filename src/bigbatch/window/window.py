"""One window: weigh, add up, correct, clip, step. Both entrances stand on it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.distributed.launcher import naming_lost_ranks
from bigbatch.distributed.rank_collectives import announce
from bigbatch.distributed.ranks import Ranks
from bigbatch.distributed.reached import Reached
from bigbatch.distributed.statement import Agreement, agreed
from bigbatch.errors import LossError, SeveralCounts, StateError, WindowBroken, WindowError
from bigbatch.loss.count import LOW_PRECISION, Count, finite, wide
from bigbatch.loss.terms import Term
from bigbatch.update import Update
from bigbatch.window import ranks_glue
from bigbatch.window.all_at_once import is_hollow, refuse_hollow, weigh_together
from bigbatch.window.backward import adding_zeros, run_backward
from bigbatch.window.gradients import Gradients
from bigbatch.window.start import Starts
from bigbatch.window.stepper import Stepper
from bigbatch.window.tally import Ledger, Weights
from bigbatch.window.term_weights import refuse_rounded_weights, weigh_terms


class Recorded(NamedTuple):
    """What a captured window came to: its tensors lie where replays write them."""

    ledger: Ledger
    loss_dtype: torch.dtype
    first_count: Tensor | None


class State(Enum):
    """What a window is in. What begins to change it marks it BROKEN, and OPEN again when all of it is done."""

    OPEN = auto()
    BROKEN = auto()
    CLOSED = auto()


OPEN, BROKEN, CLOSED = State


class Window:
    """The micro-batches between two updates.

    What it replaces, for micro-batches of any size:

        for micro_batch in window:
            (loss(micro_batch) / len(window)).backward()      # wrong as soon as two sizes or counts differ
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self, stepper: Stepper, steps: int, dtype: torch.dtype | None, totals: tuple[Count, ...] | None = None
    ) -> None:
        """Open a window; `totals` are the terms' counts over all of it, where they are known in advance."""
        self._stepper = stepper
        self._gradients = Gradients(stepper.optimizers, dtype)
        if stepper.ranks is not None:
            stepper.ranks.spoken = stepper.ranks.elsewhere = False
        self._ledger = Ledger(steps, small=stepper.scaler is not None, totals=totals)
        if stepper.ranks is not None:
            self._ledger.once = 1.0 / stepper.ranks.size
            self._ledger.in_common = stepper.ranks.sharded or stepper.ranks.overlap
            self._ledger.provisional = stepper.ranks.about  # also on a rank that only passes by
            if totals is not None:
                self._ledger.own_totals = totals
                self._ledger.totals = ranks_glue.totals(stepper.ranks, totals, self._gradients.device)
        self._starts = Starts(stepper, self._gradients)
        self._loss_dtype = torch.float32
        self._first_count: Tensor | None = None  # on its way to the host
        self._reached = False  # whether any gradient has come yet
        self._witness = stepper.open(self)
        self._shown = self._witness is None  # whether all who want to have seen the first gradient
        self.passed_by = 0  # passes that added nothing, for company
        self._left_out = 0  # gradients that the latest backward has not added to
        self.recording = False  # whether what is launched is captured, and nothing computed yet
        self.others_go_on = False  # whether other ranks have batches for another window
        in_parts = stepper.ranks is not None and stepper.ranks.sharded
        self._shards_reached = Reached(self._gradients.parameters) if in_parts else None
        self.state = OPEN
        self._failure: tuple[BaseException, str] | None = None  # what failed, and what is true of the window since

    @property
    def ledger(self) -> Ledger:
        """The window's counts."""
        return self._ledger

    @property
    def micro_batches(self) -> int:
        """How many micro-batches have been added."""
        return self._ledger.micro_batches

    @property
    def passes(self) -> int:
        """How many passes through the model it has had, those that added nothing included."""
        return self._ledger.micro_batches + self.passed_by

    @property
    def untouched(self) -> bool:
        """Whether nothing has been added, not even in part."""
        return self.state is OPEN and not self.passes

    def add(self, loss: Tensor, terms: list[Term], *, only_own: bool = True) -> None:
        """Add one micro-batch's gradient. Raises before anything is added, or leaves the window broken.

        So it does at its end: the caller, who knows that all is done, opens it again.
        """
        ledger, dtype = self._ledger, loss.dtype
        first, in_common = not ledger.micro_batches, ledger.in_common
        if not first or not self.untouched:  # gradients were looked at when the window was opened
            self.check()
        if self._stepper.ranks is not None:
            self._check_ranks(self._stepper.ranks, dtype, terms)
        weights = ledger.weigh(terms)
        if first:
            self._await(terms)
        factors: dict[Node, Tensor] = {}
        self.state = BROKEN
        if in_common or not weights.nothing:  # every pass is a meeting
            factors = self._backward(loss, terms, weights, only_own=only_own)
            if in_common and self._shards_reached is None:
                self._left_out = self._gradients.unchanged()
            self._gradients.remember()
            if not self._reached and not (in_common and self._awaits_reduction()):
                self._refuse_unreached()
            if not self._shown:
                self._show(terms, weights)
        if first or dtype != self._loss_dtype:
            self._loss_dtype = dtype if dtype == torch.float64 else torch.float32
        ledger.enter(terms, weights, loss, factors)

    def fail(self, error: BaseException) -> None:
        """Hear what has failed in a backward, or between it and the next call: what it has added cannot be told."""
        if self.state is not CLOSED:
            self.state = BROKEN
            told = f"a backward of this window failed with {type(error).__name__} and has added part of its gradients."
            self._failure = self._failure or (error, told)

    def add_together(self, found: list[tuple[Tensor, list[Term]]], *, only_own: bool) -> list[Callable[[], None]]:
        """Weigh micro-batches whose losses are all there before the first backward; returns the backward of each.

        They may wait for each other inside, so none is left out, though it may count nothing.
        """
        every = [terms for _, terms in found]
        ranks, device = self._stepper.ranks, self._gradients.device
        of_all = None if ranks is None else partial(ranks_glue.totals, ranks, device=device)
        if ranks is not None:
            ranks.refuse_ddp()
            if not ranks.elsewhere:
                announce(ranks, "the end of forward", device)
        weights = weigh_together(self._ledger, every, of_all)
        refuse_rounded_weights([loss for loss, _ in found], weights)
        self._gradients.widen()
        left, hollow = len(found), any(is_hollow(*each) for each in found)
        self._await([term for terms in every for term in terms])

        def backward(loss: Tensor, terms: list[Term], weight: Weights) -> None:
            nonlocal left
            self.state = BROKEN
            factors = self._backward(loss, terms, weight, only_own=only_own)
            left -= 1
            if left:
                self._gradients.remember()
            else:
                self._gradients.drop_unused()
                self._refuse_unreached()
                if hollow and ranks is None and self._stepper.scaler is None and not self._stepper.skip_nonfinite:
                    refuse_hollow(self._gradients)
            self._loss_dtype = loss.dtype if loss.dtype == torch.float64 else torch.float32
            self._ledger.enter(terms, weight, loss, factors)
            if not left:
                self.state = OPEN

        return [partial(backward, *each, weight) for each, weight in zip(found, weights, strict=True)]

    def _check_ranks(self, ranks: Ranks, dtype: torch.dtype, terms: list[Term]) -> None:
        """Raise where this loss cannot be added up over ranks, and agree on a unit of weights, once."""
        ranks.refuse_ddp()
        ledger, scaler = self._ledger, self._stepper.scaler
        if not ledger.in_common:
            return
        if dtype in LOW_PRECISION:
            raise LossError(_ROUNDED_IN_COMMON.format(dtype))
        if ledger.micro_batches or ledger.provisional is not None or ledger.totals is not None:
            return
        if scaler is not None and scaler.is_enabled():  # tuned to means, it would overflow with the weights of sums
            ranks.about = ledger.provisional = ranks_glue.about(ranks, ledger, terms, self._gradients.device)

    def _await(self, terms: list[Term]) -> None:
        """Start a count on its way to the host before the backward, so that reading it will not wait for that."""
        self._first_count = next((term.count for term in terms if isinstance(term.count, Tensor)), None)
        if self._first_count is not None and not self.recording:
            self._stepper.arrival.start(self._first_count)

    def _backward(self, loss: Tensor, terms: list[Term], weights: Weights, *, only_own: bool) -> dict[Node, Tensor]:
        """Add a loss's gradient; returns the factors of terms that had weights of their own."""
        factors: dict[Node, Tensor] = {}
        hooks = weigh_terms(weights, loss, terms, factors) if weights.each else ()
        try:
            start = self._starts.of(weights.whole, loss, first=not self._ledger.micro_batches)
            leaves = self._gradients.leaves if only_own else None
            if self._stepper.ranks is None:
                run_backward(loss, start, leaves)
            else:
                # Where nothing is in common, what counts nothing is left out, or others are under way beside it.
                self._run(loss, start, leaves, adds=not (weights.nothing and self._ledger.in_common))
            if not factors or weights.of_value is not None:
                return {}  # the value of the whole says it all
            return {node: factor / start.reshape(()) for node, factor in factors.items()}
        finally:
            for hook in hooks:
                hook.remove()

    def _run(self, loss: Tensor, start: Tensor, leaves: tuple[Tensor, ...] | None, *, adds: bool) -> None:
        """Run a backward in company."""
        ranks, own = self._stepper.ranks, self._gradients.parameters
        assert ranks is not None  # noqa: S101 - or it is run as it is
        noted = nullcontext() if self._shards_reached is None or not ranks.scatters else self._shards_reached.noting()
        with (
            naming_lost_ranks(),
            noted,
            ranks.around_backward(own),
            nullcontext() if adds else adding_zeros(ranks.leaves(own)),
        ):
            run_backward(loss, start, leaves)

    def _awaits_reduction(self) -> bool:
        """Whether gradients are still whole, elsewhere: they are sharded in the last backward of the window."""
        ranks = self._stepper.ranks
        return ranks is not None and ranks.sharded and ranks.overlap and not ranks.reduced

    def _refuse_unreached(self) -> None:
        """A first backward that gave no gradient at all is a mistake: the update would change nothing."""
        self._reached = self._gradients.came()
        if not self._reached:
            self.state = OPEN
            msg = (
                f"this loss reaches none of the optimizer's {len(self._gradients.parameters)} parameters: nothing was "
                "added.\n"
                "Compute it with the model that the optimizer was made from, and let no detach(), .data or "
                "torch.no_grad() cut it off on its way."
            )
            raise LossError(msg)

    @property
    def ranks(self) -> Ranks | None:
        """Who makes the big batch together with this process."""
        return self._stepper.ranks

    @property
    def gradients(self) -> Gradients:
        """The gradients of the window, for whoever adds to them beside `add`."""
        return self._gradients

    @property
    def residual(self) -> Count:
        """What `.grad` is to be multiplied with beside all weights, because a low-precision loss could not be."""
        return self._starts.residual

    @property
    def scale(self) -> Count:
        """The loss scale that is in the gradients; 1 where there is none."""
        scale = self._starts.scale()
        if scale is None:
            return 1.0
        return scale.item() if scale.is_cpu else wide(scale)

    def _show(self, terms: list[Term], weights: Weights) -> None:
        mean = next((term for term in terms if term.kind == "mean"), None)
        if mean is None or weights.each:  # no one weight that would make it a gradient of its own
            self._shown = True
        elif self._witness is not None:
            self._shown = True
            self._witness.first(self, weights.whole * self.scale, mean.count)

    def pass_by(self, loss: Tensor, *, only_own: bool = False) -> None:
        """Run a backward that adds nothing: other ranks have more micro-batches, and every pass is a meeting."""
        self.state = BROKEN
        self._run(loss, torch.zeros_like(loss), self._gradients.leaves if only_own else None, adds=False)
        self._gradients.remember()
        self.passed_by += 1

    def enter_replayed(self, terms: list[Term], loss: Tensor) -> None:
        """Enter a micro-batch whose gradient a replay of a captured micro-step has added."""
        weights = self._ledger.weigh(terms)
        if not self._ledger.micro_batches:
            self._await(terms)
        if not self._shown:
            self._show(terms, weights)
        self._loss_dtype = loss.dtype if loss.dtype == torch.float64 else torch.float32
        self._ledger.enter(terms, weights, loss, {})

    def recorded(self) -> Recorded:
        """Return what was captured, as it is: everything is in there, to the last sum."""
        self._ledger.fold()
        return Recorded(replace(self._ledger), self._loss_dtype, self._first_count)

    def take(self, recorded: Recorded) -> None:
        """Take over what a replay of a whole window has come to, in copies: the next one writes to the same places."""
        self._ledger.take(recorded.ledger)
        self._loss_dtype = recorded.loss_dtype
        self._first_count = None if recorded.first_count is None else recorded.first_count.clone()
        if self._first_count is not None:
            self._stepper.arrival.start(self._first_count)
        self._gradients.remember()

    def check(self) -> None:
        """Raise where the window cannot go on."""
        if self.state is not OPEN:
            error, failure = self._failure or (None, "a backward or a step of this window failed.")
            msg = f"{failure}\nDrop the window and go on with the next:  accumulator.discard()"
            raise WindowBroken(msg) from error
        self._gradients.check()

    def close(self, *, checked: bool = False, goes_on: bool = False, stepping: bool = True) -> Update:
        """Correct, clip and step; the parameters are as before the window, but for the step.

        `goes_on` tells other ranks whether this one has batches for another window. Without `stepping` the gradient
        that was corrected is left in `.grad`.
        """
        if not checked:
            self.check()
        if self._ledger.pending:
            self._ledger.fold()
        ranks = self._stepper.ranks
        try:
            if ranks is None:
                return self._close_alone(stepping=stepping)
            return self._close_with(ranks, goes_on=goes_on, stepping=stepping)
        except BaseException as error:
            if self.state is not OPEN:
                self._failure = error, self._stepper.give_up(error)
            raise

    def _close_alone(self, *, stepping: bool) -> Update:
        ledger = self._ledger
        if ledger.in_ratio is not None:
            self._refuse_lost_ratio()
        if ledger.totals is not None:
            ledger.refuse_other_totals()
        loss, _ = ledger.big_loss(), finite(ledger.total)
        norm: Tensor | None = None
        skipped: bool | Tensor = True
        self.state = BROKEN
        if self._counted_anything():
            if self._witness is not None:
                self._witness.whole(self)
            correction = ledger.correction() * self._starts.correction()
            norm, skipped = self._step(correction, stepping=stepping)
        self.discard(released=stepping or skipped is True)
        return Update(
            micro_batches=ledger.micro_batches,
            count=ledger.count,
            grad_norm=norm,
            _loss=loss,
            _dtype=self._loss_dtype,
            _skipped=skipped,
            _loss_known=ledger.loss_known,
        )

    def _step(
        self, correction: Count, *, stepping: bool, hooks_elsewhere: bool = False
    ) -> tuple[Tensor | None, bool | Tensor]:
        if stepping:
            return self._stepper.step(self._gradients, correction, hooks_elsewhere=hooks_elsewhere)
        self._stepper.hand_over(self._gradients, correction, hooks_elsewhere=hooks_elsewhere)
        return None, False

    def _close_with(self, ranks: Ranks, *, goes_on: bool, stepping: bool) -> Update:
        """Do so together with other ranks: agree on what was counted, add up, and make the same step."""
        ledger, gradients = self._ledger, self._gradients
        self._refuse_unreduced(ranks)
        if ledger.totals is not None:
            ledger.refuse_other_totals()
        mine = ranks_glue.statement(
            ledger,
            gradients,
            ranks,
            goes_on=goes_on,
            precise=self._loss_dtype == torch.float64,
            left_out=self._left_out,
            partial=0 if self._shards_reached is None else self._shards_reached.partial + ranks.dropped,
            stepper=self._stepper,
        )
        agreement = agreed(ranks, mine, gradients.device)
        if ledger.in_ratio is not None:
            self._refuse_lost_ratio()
        self.others_go_on = agreement.others_go_on
        if self._shards_reached is not None and agreement.partial:
            ranks_glue.refuse_other_parts(ranks, self._shards_reached, gradients.device)
            ranks.dropped = 0
        self._refuse_nonfinite(ranks, agreement)
        ranks.share_buffers()  # before the step, which may fail on one rank: the others would wait here
        norm: Tensor | None = None
        skipped: bool | Tensor = True
        self.state = BROKEN
        if ranks_glue.counted(agreement, ledger):
            if ranks.adds_up:
                ranks_glue.fill(ranks, gradients, agreement)
            correction = self._starts.correction(of_all=True)
            if agreement.kind == "mean":
                correction = correction * ((ledger.provisional or 1.0) / agreement.total)
            if ranks.reduced and not ranks.sharded:
                correction = correction * ranks.size  # DDP has averaged
            gradients.scale(correction)
            if ranks.adds_up:
                ranks.add_up(gradients.dense())
            norm, skipped = self._step(1.0, stepping=stepping, hooks_elsewhere=agreement.hooks)
        ranks.windows += 1
        self._shards_reached = None  # nothing of them is dropped
        self.discard(released=stepping or skipped is True)
        return Update(
            micro_batches=agreement.micro_batches,
            count=ranks_glue.count(agreement, ledger),
            grad_norm=norm,
            _loss=ranks_glue.loss(agreement),
            _loss_known=agreement.loss_known,
            _dtype=torch.float64 if agreement.precise else torch.float32,
            _skipped=skipped,
        )

    def _refuse_unreduced(self, ranks: Ranks) -> None:
        """Raise where shards have kept their gradients whole until a last backward that did not come."""
        if ranks.sharded and ranks.overlap and not ranks.reduced and self.passes:
            raise WindowError(_NOT_REDUCED)

    def _refuse_nonfinite(self, ranks: Ranks, agreement: Agreement) -> None:
        """Raise where a count of 0 may have left 0 / 0 in the gradient of all ranks, and nobody would skip it."""
        if agreement.nothings and self._stepper.scaler is None and not self._stepper.skip_nonfinite:
            ranks_glue.refuse_nonfinite(ranks, self._gradients)

    def discard(self, *, released: bool = True) -> None:
        """Drop the window: no gradient is left of it, unless it is left to others and not `released`."""
        if self.state is CLOSED:  # the gradients may be another's by now
            return
        if released:
            self._gradients.release()
        else:
            self._gradients.let_go()
        ranks = self._stepper.ranks
        if ranks is not None and self._shards_reached is not None and not ranks.overlap:
            ranks.dropped += self._shards_reached.backwards
            self._shards_reached = None
        if ranks is not None and ranks.shards is not None and ranks.overlap:
            ranks.shards.forget(self._gradients.parameters)
        self.state, self._stepper.window = CLOSED, None

    def _counted_anything(self) -> bool:
        """Whether anything was counted; an empty window makes no update."""
        if (
            self._ledger.kind in {"mean", "known"}
            and self._first_count is not None
            and self._stepper.arrival.read() > 0
        ):
            return True
        return self._ledger.counted_anything()

    def _refuse_lost_ratio(self) -> None:
        """On a device, whether several counts kept their ratio is only known now: one wait, before the step."""
        if not bool(self._ledger.in_ratio):
            msg = (
                "the terms of this loss were averaged over different things, in no constant ratio; nothing was "
                "stepped.\n"
                "Give the counts of a batch in advance, one per term in the order in which they are written:\n"
                "    Accumulator(..., counts=lambda batch: ((batch['labels'] != -100).sum(), len(batch['labels'])))\n"
                "and drop this window:  accumulator.discard()"
            )
            raise SeveralCounts(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return the window: its provisional gradients and its running totals."""
        self.check()
        residual = self._starts.residual
        return {
            "gradients": self._gradients.snapshot(),
            "residual": residual.clone() if isinstance(residual, Tensor) else residual,
            "double": self._loss_dtype == torch.float64,
            **self._ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a window was saved."""
        missing = {"gradients", "residual", "double"} - state.keys()
        if missing:
            msg = f"this window lacks {', '.join(sorted(missing))}: it is not the state_dict() of an Accumulator"
            raise StateError(msg)
        if not isinstance(state["gradients"], list | tuple) or not isinstance(state["residual"], int | float | Tensor):
            msg = (
                "the gradients of this window are no list, or its residual no number: it was changed since it was saved"
            )
            raise StateError(msg)
        self._ledger.load_state_dict(state)
        self._gradients.restore(state["gradients"])
        residual = state["residual"]
        self._starts.residual = residual.clone() if isinstance(residual, Tensor) else residual
        self._loss_dtype = torch.float64 if state["double"] else torch.float32
        self._shown = True  # or never: its first gradient has others added to it by now


_NOT_REDUCED = (
    "this window ends before its last micro-batch, by flush() or a batch of `over` without a backward, and with "
    "overlap=True a sharded model reduces its gradients in the last backward alone. Nothing was stepped.\n"
    "Take overlap=True out, which reduces in every backward; or set accumulator.steps before a shorter window. Drop "
    "this one:  accumulator.discard()"
)
_ROUNDED_IN_COMMON = (
    "this loss is of {}, which would round its weight, and what is left over cannot be made good where gradients of "
    "all ranks are added up in backward (fully_shard, or overlap=True).\n"
    "Compute the loss in float32:  criterion(logits.float(), labels)"
)

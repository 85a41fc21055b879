"""One window: weigh, add up, correct, clip, step. Both entrances stand on it."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.distributed.statement import Statement, rates
from bigbatch.errors import LossError, StateError, WindowBroken, WindowError
from bigbatch.loss.count import LOW_PRECISION, Count, Term, finite, wide
from bigbatch.update import Update
from bigbatch.window.all_at_once import is_hollow, weigh_together
from bigbatch.window.backward import Starts, refuse_rounded_weights, run_backward, weigh_terms
from bigbatch.window.gradients import Gradients, all_parameters
from bigbatch.window.stepper import Stepper
from bigbatch.window.tally import Ledger, Weights, copied


@dataclass(slots=True)
class Alike:
    """A plain mean that was added: how it was read, and the latest start of a backward of such a loss."""

    reading: object
    dtype: torch.dtype
    ledger: Ledger  # that it was entered in, perhaps of a window before
    weight: float = 0.0
    start: Tensor | None = None


State = Enum("State", "OPEN BROKEN CLOSED")  # what begins to change a window marks it broken until all of it is done
OPEN, BROKEN, CLOSED = State


class Window:
    """The micro-batches between two updates.

    What it replaces, for micro-batches of any size:

        for micro_batch in window:
            (loss(micro_batch) / len(window)).backward()      # wrong as soon as two sizes or counts differ
        optimizer.step()
        optimizer.zero_grad()
    """

    passed_by: int = 0  # passes that added nothing, for company
    recording: bool = False  # whether what is launched is captured, and nothing computed yet
    _reached: bool = False  # whether any gradient has come yet
    _around: ExitStack | None = None  # what is to hold during that
    _failure: tuple[BaseException | None, str] | None = None  # what failed, and what is true of the window since

    def __init__(
        self, stepper: Stepper, steps: int, dtype: torch.dtype | None, totals: tuple[Count, ...] | None = None
    ) -> None:
        """Open a window; `totals` are the terms' counts over all of it, where they are known in advance."""
        team = stepper.team
        self._stepper, self._team = stepper, team
        self.gradients = Gradients(stepper.optimizers, dtype)  # for whoever adds to them beside `add`
        team.open_window()
        self.ledger = ledger = Ledger(steps, team, small=stepper.scaler is not None)
        if totals is not None:
            ledger.own_totals, ledger.totals = totals, team.totals(totals, self.gradients.device)
        self.starts = Starts(stepper.scaler, self.gradients)
        self._witness = stepper.open(self)
        self._shown = self._witness is None  # whether all who want to have seen the first gradient
        self.state = OPEN

    @property
    def micro_batches(self) -> int:
        """How many micro-batches have been added."""
        return self.ledger.micro_batches

    @property
    def passes(self) -> int:
        """How many passes through the model it has had, those that added nothing included."""
        return self.ledger.micro_batches + self.passed_by

    @property
    def untouched(self) -> bool:
        """Whether nothing has been added, not even in part."""
        return self.state is OPEN and not self.passes

    @property
    def ranks(self) -> Any:
        """The other processes that make the big batch; None where there are none."""
        return None if self._team.is_alone else self._team

    @property
    def scale(self) -> Count:
        """The loss scale that is in the gradients; 1 where there is none."""
        scale = self.starts.scale()
        return 1.0 if scale is None else scale.item() if scale.is_cpu else wide(scale)

    def add(self, loss: Tensor, terms: list[Term], *, only_own: bool = True, reading: object = None) -> "Alike | None":
        """Add one micro-batch's gradient. Raises before anything is added, or leaves the window broken.

        So it does at its end: the caller, who knows that all is done, opens it again. Where `reading` is how a plain
        mean was read, it returns what the next loss that is read so need not pass again.
        """
        ledger, team = self.ledger, self._team
        if not self.untouched:  # gradients were looked at when the window was opened
            self.check()
        weights, factors = self._weights(loss, terms), dict[Node, Tensor]()
        self.state = BROKEN
        if ledger.in_common or not weights.nothing:  # where it is in common, every pass is a meeting
            factors = self._backward(loss, terms, weights, only_own=only_own)
            self._note_gradients()
            if not self._shown:
                self._show(terms, weights)
        ledger.enter(terms, weights, loss, factors)
        if reading is None or not (only_own and self._shown and team.is_alone and ledger.is_plain and loss.is_cpu):
            return None
        is_weighed = self._stepper.scaler is None and loss.dtype not in LOW_PRECISION and self.starts.residual == 1.0
        return Alike(reading, loss.dtype, ledger) if is_weighed else None

    def add_alike(self, loss: Tensor, count: float, alike: "Alike") -> None:
        """Add one more micro-batch whose loss was read as the latest, on the shortest way: small models feel it."""
        ledger = self.ledger
        if ledger.micro_batches or self.state is not OPEN:  # gradients were looked at when the window was opened
            self.check()
        else:
            ledger.begin_alike(alike.ledger, count)
        weight: float = count / ledger.provisional  # type: ignore[operator, assignment]  # a number: is_plain
        self.state = BROKEN
        if alike.start is None or alike.weight != weight:
            alike.weight, alike.start = weight, self.starts.of(weight, loss, first=False)
        run_backward(loss, alike.start, self.gradients.parameters)
        self.gradients.remember()
        if not self._reached:
            self._refuse_unreached()
        ledger.micro_batches += 1
        ledger.total += count
        ledger.loss += loss.item() * count

    def weigh(self, loss: Tensor, terms: list[Term], times: float) -> None:
        """Have the next backward of a loss, whoever runs it, add one micro-batch's gradient: that of the loss x times.

        Others scale losses where a scaler does.
        """
        first = self.untouched
        if not first and not self._stepper.weighed:
            raise WindowError(
                "this window was begun with accumulator.backward(loss), and goes on with it.",
                fix="backward, or weigh and settle, for all micro-batches of a window",
            )
        self.ledger.small = True  # somebody may multiply with a loss scale, which is tuned to means
        weights = self._weights(loss, terms)
        self._stepper.weighed = True  # others step for it
        factors, around = dict[Node, Tensor](), ExitStack()
        self._around = around
        hooks = weigh_terms(weights, loss, terms, factors) if weights.each else []
        start = self.starts.of(weights.whole, loss, first=first, scaled=False) * times
        found: list[tuple[Tensor, Tensor]] = []  # the gradient that came to the loss, and what it was made
        queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001

        def weighed(gradient: Tensor) -> Tensor:
            queue(lambda: queue(added))  # behind what the backward itself leaves for its end, as FSDP does
            found.append((gradient, gradient * start))
            return found[0][1]

        def added() -> None:
            around.close()
            for hook in hooks:
                hook.remove()
            self._note_gradients()
            came, weighted = found[0]
            value = loss.detach() * self.starts.undivided(times, came)
            self.ledger.enter(terms, weights, value, _apart(factors, weights, weighted))
            self._failure, self.state = None, OPEN

        around.enter_context(self._team.around_backward(self.gradients.parameters, adds=not weights.nothing))
        hooks.append(loss.register_hook(weighed))
        self._failure, self.state = (None, "a loss was weighed, and its backward failed or did not come."), BROKEN

    def add_together(self, found: list[tuple[Tensor, list[Term]]], *, only_own: bool) -> list[Callable[[], None]]:
        """Weigh micro-batches whose losses are all there before the first backward; returns the backward of each.

        They may wait for each other inside, so none is left out, though it may count nothing.
        """
        every = [terms for _, terms in found]
        team, gradients, left = self._team, self.gradients, len(found)
        team.check_loss(found[0][0].dtype)
        if not team.elsewhere:
            team.announce("the end of forward", gradients.device)
        of_all = None if team.is_alone else partial(team.totals, device=gradients.device)
        weights = weigh_together(self.ledger, every, of_all)
        refuse_rounded_weights([loss for loss, _ in found], weights)
        gradients.widen()
        self.ledger.nothings = self.ledger.nothings + float(sum(is_hollow(*each) for each in found))
        self._await([term for terms in every for term in terms])

        def backward(loss: Tensor, terms: list[Term], weight: Weights) -> None:
            nonlocal left
            self.state = BROKEN
            factors = self._backward(loss, terms, weight, only_own=only_own)
            left -= 1
            if left:
                gradients.remember()
            else:
                gradients.drop_unused()
                self._refuse_unreached()
            self.ledger.enter(terms, weight, loss, factors)
            if not left:
                self.state = OPEN

        return [partial(backward, *each, weight) for each, weight in zip(found, weights, strict=True)]

    def pass_by(self, loss: Tensor, *, only_own: bool = False) -> None:
        """Run a backward that adds nothing: other ranks have more micro-batches, and every pass is a meeting."""
        self.state = BROKEN
        with self._team.around_backward(self.gradients.parameters, adds=False):
            run_backward(loss, torch.zeros_like(loss), self.gradients.parameters if only_own else None)
        self.gradients.remember()
        self.passed_by += 1

    def enter_replayed(self, terms: list[Term], loss: Tensor) -> None:
        """Enter a micro-batch whose gradient a replay of a captured micro-step has added."""
        weights = self._weights(loss, terms)
        if not self._shown:
            self._show(terms, weights)
        self.ledger.enter(terms, weights, loss, {})

    def recorded(self) -> Ledger:
        """Return what was captured, as it is: everything is in there, to the last sum."""
        self.ledger.fold()
        return copy.copy(self.ledger)

    def take(self, recorded: Ledger) -> None:
        """Take over what a replay of a whole window has come to, in copies: the next one writes to the same places."""
        self.ledger.take(recorded)
        if self.ledger.first_count is not None:
            self._stepper.arrival.start(self.ledger.first_count)
        self.gradients.remember()

    def _weights(self, loss: Tensor, terms: list[Term]) -> Weights:
        """Weigh a micro-batch, or raise; a first one begins to tell others, and the host, what it counts."""
        ledger, team, scaler = self.ledger, self._team, self._stepper.scaler
        if not team.is_alone:
            team.check_loss(loss.dtype)
            # Where a scaler is tuned to means, weights of sums would overflow: ranks agree on a unit, once.
            known = ledger.micro_batches or ledger.provisional is not None or ledger.totals is not None
            if ledger.in_common and not known and scaler is not None and scaler.is_enabled():
                own = next((term.count for term in terms if term.kind == "mean"), 0.0)
                (total,) = team.totals((own * ledger.steps,), self.gradients.device)
                ledger.provisional = team.unit = max(float(total), 1.0)
        weights = ledger.weigh(terms)
        if not ledger.micro_batches:
            self._await(terms)
        return weights

    def _await(self, terms: list[Term]) -> None:
        """Start a count on its way to the host before the backward, so that reading it will not wait for that."""
        for term in terms:
            if isinstance(term.count, Tensor):
                self.ledger.first_count = term.count
                if not self.recording:
                    self._stepper.arrival.start(term.count)
                return

    def _backward(self, loss: Tensor, terms: list[Term], weights: Weights, *, only_own: bool) -> dict[Node, Tensor]:
        factors: dict[Node, Tensor] = {}
        hooks = weigh_terms(weights, loss, terms, factors) if weights.each else ()
        try:
            start = self.starts.of(weights.whole, loss, first=not self.ledger.micro_batches)
            leaves = self.gradients.parameters if only_own else None
            if self._team.is_alone:  # a context is felt by a small model
                run_backward(loss, start, leaves)
            else:
                # Where nothing is in common, what counts nothing is left out, or others are under way beside it.
                adds = not (self.ledger.in_common and weights.nothing)
                with self._team.around_backward(self.gradients.parameters, adds=adds):
                    run_backward(loss, start, leaves)
            return _apart(factors, weights, start) if factors else {}
        finally:
            for hook in hooks:
                hook.remove()

    def _note_gradients(self) -> None:
        self.gradients.remember()
        if not self._reached and not (self.ledger.in_common and self._team.holds_back):
            self._refuse_unreached()

    def _refuse_unreached(self) -> None:
        self._reached = any(p.grad is not None for p in self.gradients.parameters)
        if not self._reached:
            self.state = OPEN
            raise LossError(
                f"this loss reaches none of the optimizer's {len(self.gradients.parameters)} parameters: nothing was "
                "added.\n"
                "Compute it with the model that the optimizer was made from, and let no detach(), .data or "
                "torch.no_grad() cut it off on its way."
            )

    def _show(self, terms: list[Term], weights: Weights) -> None:
        """Show the first gradient, unless no one weight would make it a gradient of its own."""
        self._shown, mean = True, next((term for term in terms if term.kind == "mean"), None)
        if mean is not None and not weights.each and self._witness is not None:
            self._witness.first(self, weights.whole * self.scale, mean.count)

    def check(self) -> None:
        """Raise where the window cannot go on."""
        if self.state is not OPEN:
            error, failure = self._failure or (None, "a backward or a step of this window failed.")
            raise WindowBroken(failure, fix="accumulator.discard(), then the next window", fix_in_step="") from error
        self.gradients.check()

    def fail(self, error: BaseException) -> None:
        """Note what has failed in a backward, or between it and the next call: what it has added cannot be told."""
        if self.state is not CLOSED:
            self.state = BROKEN
            told = f"a backward of this window failed with {type(error).__name__} and has added part of its gradients."
            self._failure = self._failure or (error, told)

    def close(self, *, checked: bool = False, goes_on: bool = False, stepping: bool = True) -> Update:
        """Correct, clip and step; the parameters are as before the window, but for the step.

        `goes_on` tells other ranks whether this one has batches for another window. Without `stepping` the gradient
        that was corrected is left in `.grad`.
        """
        if not checked:
            self.check()
        if stepping and self._stepper.weighed:
            raise WindowError(
                "this window was begun with accumulator.weigh(loss), whose step is made by the loop.",
                fix="accumulator.settle(); optimizer.step()",
            )
        try:
            return self._close(goes_on=goes_on, stepping=stepping)
        except BaseException as error:
            if self.state is not OPEN:
                self._failure = error, self._stepper.give_up(error)
            raise

    def _close(self, *, goes_on: bool, stepping: bool) -> Update:
        """Agree on what was counted, correct, add up and step. One process agrees with itself, without waiting."""
        ledger, gradients, team, stepper = self.ledger, self.gradients, self._team, self._stepper
        if ledger.pending:
            ledger.fold()
        ledger.refuse_late()
        agreement = ledger.statement()
        if not team.is_alone:
            settings = {} if team.windows else stepper.settings(gradients.dtype)  # in the first window
            words = {"form": {"loss": ledger.form()}, "common": {"lr": rates(stepper.optimizers), **settings}}
            agreement = team.agree(agreement._replace(going=int(goes_on)), words, gradients)
        loss, _ = agreement.big_loss(), finite(agreement.total)
        nothings = agreement.nothings  # a device is not waited for
        if not isinstance(nothings, Tensor) and nothings and stepper.scaler is None and not stepper.skip_nonfinite:
            self._refuse_hollow()
        norm: Tensor | None = None
        skipped: bool | Tensor = True
        self.state = BROKEN
        if self._counted_anything(agreement):
            if self._witness is not None:
                self._witness.whole(self)
            rest = team.reduce(gradients, ledger.correction(agreement) * self.starts.correction(), agreement)
            if stepping:
                norm, skipped = stepper.step(gradients, rest)
            else:
                stepper.hand_over(gradients, rest)
                skipped = False
        team.windows += 1
        self._end(cleared=stepping or skipped is True)
        return Update(
            micro_batches=agreement.micro_batches,
            count=ledger.count_of(agreement),
            grad_norm=norm,
            _loss=loss,
            _dtype=torch.float64 if agreement.precise else torch.float32,
            _skipped=skipped,
            _loss_known=agreement.loss_known,
        )

    def _refuse_hollow(self) -> None:
        """Raise on all ranks where a micro-batch that counts nothing may have left 0 / 0 in the gradient."""
        gradients = self.gradients
        broken = bool(gradients.dense()) and not bool(torch.isfinite(gradients.norm()))
        if broken if self._team.is_alone else self._team.most(broken, gradients.device):
            raise LossError(
                "the gradient is not finite, and a micro-batch of this window counts nothing, on this rank or another: "
                "a loss that divides by its count by hand has 0 / 0 in its gradient. Nothing was stepped.",
                fix="loss = (values * mask).sum() / mask.sum().clamp(min=1), with count=mask.sum()",
                fix_in_step="counted((values * mask).sum() / mask.sum().clamp(min=1), mask.sum())",
            )

    def _counted_anything(self, agreement: Statement) -> bool:
        """Whether anything was counted, by anyone; an empty window makes no update."""
        is_under_way = self.ledger.first_count is not None and agreement.kind in {"mean", "known"}
        if is_under_way and self._stepper.arrival.read() > 0:
            return True
        if agreement.kind == "mean":
            return bool(agreement.total > 0)
        totals = self.ledger.totals
        return agreement.micro_batches > 0 and (not totals or any(bool(total > 0) for total in totals))

    def discard(self) -> None:
        """Drop the window: no gradient is left of it."""
        if self.state is CLOSED:  # the gradients may be another's by now
            return
        try:
            self._end(cleared=True)
        except BaseException:  # an interrupt: what is cleared twice is clear
            self._end(cleared=True)
            raise

    def _end(self, *, cleared: bool) -> None:
        if self._around is not None:
            self._around.close()
        self.gradients.release(cleared=cleared)
        self._team.drop(self.gradients.parameters)
        self.state, self._stepper.window = CLOSED, None

    def state_dict(self) -> dict[str, Any]:
        """Return the window: its provisional gradients and its running totals."""
        self.check()
        return {
            "gradients": [None if p.grad is None else p.grad.detach().clone() for p in self.gradients.parameters],
            "residual": copied(self.starts.residual),
            "double": self.ledger.precise,
            **self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a window was saved that `refuse_unfit_window` has let pass; where that fails, nothing goes on."""
        self.state, ledger, gradients = BROKEN, self.ledger, self.gradients
        try:
            ledger.load_state_dict(state)
            pairs = zip(state["gradients"], gradients.parameters, strict=True)
            gradients.preset([None if saved is None else saved.to(p.device, copy=True) for saved, p in pairs])
            self.starts.residual = copied(state["residual"])
        except BaseException as error:
            self._failure = error, f"the window that was saved could not be loaded: {type(error).__name__}."
            gradients.release()
            raise
        ledger.precise, ledger.first_count, self.state = bool(state["double"]), None, OPEN
        self._shown = True  # or never: its first gradient has others added to it by now


def _apart(factors: dict[Node, Tensor], weights: Weights, start: Tensor) -> dict[Node, Tensor]:
    """Return what is between a loss and its terms, from the gradients that came there; none where it is known."""
    return {} if weights.of_value is not None else {node: each / start.reshape(()) for node, each in factors.items()}


def refuse_unfit_window(state: object, stepper: Stepper, dtype: torch.dtype | None) -> None:
    """Refuse what is not the saved window of an accumulator with these parameters; nothing is changed yet."""
    wanted = {"gradients", "residual", "double", "micro_batches", "total"}
    if not isinstance(state, dict) or wanted - state.keys():
        raise StateError(f"this is not the window of an Accumulator: it should hold {', '.join(sorted(wanted))}")
    saved, parameters = state["gradients"], [p for p in all_parameters(stepper.optimizers) if p.requires_grad]
    fits = all(
        gradient is None
        or (gradient.shape == p.shape and gradient.dtype in {p.dtype, dtype if p.dtype in LOW_PRECISION else p.dtype})
        for gradient, p in zip(saved, parameters, strict=False)
    )
    if len(saved) != len(parameters) or not fits:
        raise StateError(
            f"this window does not fit: it was saved with {len(saved)} trainable parameters, and the optimizer has "
            f"{len(parameters)}, or with others or in another gradient_dtype.",
            fix="the same model, optimizer and gradient_dtype that it was saved with",
        )

"""Micro-batches come in, updates come out."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch import arguments
from bigbatch.distributed.discovery import team_of
from bigbatch.errors import BigBatchError, StateError, WindowDisturbed, WindowError, WindowOpen
from bigbatch.loop import Listener, Loop, Over, Source
from bigbatch.loss import refusals
from bigbatch.loss.count import Count, GivenCount, checked_count
from bigbatch.loss.terms import Term
from bigbatch.state.scope import asked_anywhere, times_asked
from bigbatch.update import Update
from bigbatch.window.forgotten import Forgotten
from bigbatch.window.gate import Admission
from bigbatch.window.gradients import all_parameters, setting_aside
from bigbatch.window.observer import Witness
from bigbatch.window.stepper import Stepper, refuse_copy
from bigbatch.window.window import CLOSED, OPEN, Window

Batch = TypeVar("Batch")
STATE_VERSION = 1
_WINDOW_OF_ONE = (
    "this state_dict holds an open window, which one process has saved: every rank would load the same gradients, and "
    "add them up once for each of them.\n"
    "Finish that window in one process, and save between two updates: such a state_dict loads on any number of ranks."
)
_OTHERS_GO_ON = (
    "this rank has left its loop by break and made its last update, and others go on with theirs: each of their "
    "windows would wait for one of this rank.\n"
    "Break on all ranks in the same window, or on none: a rank whose loader has ended takes part by itself."
)


class Accumulator:
    """Accumulate gradients over micro-batches so that each update has exactly the big batch's gradient.

        accumulator = Accumulator(model, optimizer, steps=4)
        for inputs, labels in accumulator.over(loader):
            accumulator.backward(criterion(model(inputs), labels))

    It replaces, and unlike it is exact for short windows, short micro-batches, masked targets and class weights:

        for i, (inputs, labels) in enumerate(loader):
            loss = criterion(model(inputs), labels) / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    `model` and `optimizer` are one or a sequence each; the gradient's norm is then one over all of them.

    Args:
        model: whose BatchNorm layers are looked at and whose frozen weights are known.
        optimizer: whose parameters get gradients; a loss leaves all others alone.
        steps: micro-batches per update; may be set to another number between windows.
        clip_norm: the largest norm of the corrected gradient. `math.inf` reports the norm and clips nothing.
        scheduler: stepped once per real update, not after a skipped one.
        scaler: unscaled, stepped and updated once per window; pass the loss unscaled.
        gradient_dtype: what the gradients of bf16 and fp16 parameters are added up in; None: in their own.
        batch_norm: "refuse" training-mode BatchNorm, or accept "micro"-batch statistics, which differ.
        counts: a function from a batch to the counts of the loss's terms, for losses with several counts.
        skip_nonfinite: leave the optimizer alone where the gradient has an inf or NaN. Costs one host
            synchronisation per update; none with a fused optimizer and no scheduler.
        group: the processes that make a big batch together; by default those that the model's
            DistributedDataParallel or `fully_shard` was made for.
        mesh: gone: use `group`.
        overlap: have gradients reduced in each window's last backward: by DDP beside the computation, instead of
            after it; by a sharded model there alone, instead of in every backward. All ranks then need as many windows,
            and with DDP each parameter a gradient in the last micro-batch.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        steps: int,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        gradient_dtype: torch.dtype | None = torch.float32,
        batch_norm: Literal["refuse", "micro"] = "refuse",
        counts: Callable[[Any], Any] | None = None,
        skip_nonfinite: bool = False,
        group: ProcessGroup | None = None,
        mesh: None = None,
        overlap: bool = False,
    ) -> None:
        """Check every argument; nothing is changed yet."""
        arguments.mesh(mesh)
        self._models = arguments.models(model, ranks=True)
        optimizers = arguments.optimizers(optimizer, self._models)
        self._steps = arguments.steps(steps)
        self._gradient_dtype = arguments.gradient_dtype(gradient_dtype)
        self._counts = arguments.counts(counts)
        self._stepper = Stepper(
            optimizers,
            schedulers=arguments.schedulers(scheduler, optimizers),
            scaler=arguments.scaler(scaler),
            clip_norm=arguments.clip_norm(clip_norm),
            skip_nonfinite=arguments.skip_nonfinite(skip_nonfinite),
            team=team_of(self._models, group, overlap=arguments.overlap(overlap), trained=all_parameters(optimizers)),
        )
        self._team = self._stepper.team
        accepting = 'Accumulator(..., batch_norm="micro")'
        self._admission = Admission(self._models, optimizers, arguments.batch_norm(batch_norm), accepting)
        self._stepper.watch()
        self._team.serve(self)
        self._team.prepare(last=self._steps == 1)
        self._window: Window | None = None
        self._forgotten = Forgotten(self)
        self._resumed = False  # a window loaded from a state_dict: the next `over` goes on with it
        self._loop = Loop()
        self._kept: list[Source[Any]] = []
        self._asked_in_training = times_asked(in_training=True)  # when a loss last passed
        self._asked_anywhere = asked_anywhere[0]  # when that was last looked at
        self._refused: weakref.ref[Tensor] | None = None  # the loss that was refused for it
        self._warned = self._warned_of_moving = False
        self._to_compare = 8  # losses that come with a count, with what their graphs show
        self._compared: tuple[float, float] | None = None  # the first of the window
        self._promised = False  # whether other ranks were told of another window
        self._others_go_on = False  # whether they have told of one

    @property
    def steps(self) -> int:
        """How many micro-batches make an update."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        steps = arguments.steps(steps)
        if self._window is not None and steps != self._steps:
            msg = (
                f"steps cannot change from {self._steps} to {steps} inside a window: {self._window.micro_batches} "
                "micro-batches were weighed for the old one.\n"
                "Change it between windows, after accumulator.flush() or when backward has returned an Update."
            )
            raise WindowOpen(msg)
        self._steps = steps
        if not self._team.is_alone:
            self._prepare()  # the next micro-batch may be its window's last now, or no longer

    @property
    def remaining(self) -> int:
        """How many micro-batches are missing until the window is full."""
        return self._steps - (self._window.micro_batches if self._window is not None else 0)

    def over(self, loader: Iterable[Batch]) -> Over[Batch]:
        """Wrap a loader, so that its last window is closed even if it is short.

        The last batch is known from `len`, where that is no estimate. A loader without one is read one batch ahead (a
        window ahead with `counts=`), and none is lost: an iterator that is left by `break` goes on where it was. One
        with a `state_dict` is not read ahead; its last window is closed when it ends.
        """
        arguments.loader(loader)
        self._refuse_open_window()
        listener = Listener(
            opening=self._open,
            announce=self._announce,
            exhausted=self._end,  # where the last batch made no backward, what came before must not be lost
            left=self._leave,
            remaining=lambda: self.remaining,
            kept=self._kept,
            most=self._most if self._team.sharded else None,
            must_know=self._team.looks_ahead,
        )
        return Over(loader, listener, self._counts)

    def backward(  # noqa: C901 - a call less for every micro-batch
        self, loss: Tensor, count: GivenCount | None = None
    ) -> Update | None:
        """Add one micro-batch's gradient; returns the Update that it completed, or None.

        `count` says what the loss was averaged over where its graph cannot tell; see `counted`.
        """
        loop, window, admission, added = self._loop, self._window, self._admission, None
        try:
            arguments.loss(loss, self._stepper.scaler)
            if asked_anywhere[0] != self._asked_anywhere or loop.spent:
                self._refuse_questions(loss)
                self._refuse_second_backward()
            if window is None:
                admission.open()
                admission.warn_of_hooks(several=self._steps > 1 or not self._team.is_alone)
            if admission.batch_norms:  # asked here, and so below: a call for nothing is felt by a small model
                admission.look()
            terms = self._read(loss, count)
            if admission.reader.fresh or admission.may_wake:
                admission.scan(loss)
                self._warn_of_moving()
            if admission.others:
                admission.refuse_changed(loss)
            loop.spent, added = loop.of_over, False
            if window is None:
                window = self._window = Window(self._stepper, self._steps, self._gradient_dtype, self._known_totals())
                self._forgotten.opened(window.ledger)
            if loop.repeated:
                with admission.sparing_others():
                    window.pass_by(loss, only_own=admission.only_own)
            elif admission.only_own:
                window.add(loss, terms)
            else:
                with admission.sparing_others():
                    window.add(loss, terms, only_own=False)
            window.state, added = OPEN, True
            if loop.last or window.passes >= self._steps:
                return self._close(window, checked=True)
        except BaseException as error:
            self._fail(loop, error, added=added)
            raise
        if not self._team.is_alone:
            self._prepare()
        return None

    def _fail(self, loop: Loop, error: BaseException, *, added: bool | None) -> None:
        """A backward has failed: it was refused, perhaps before it began, or nobody can tell how far it came."""
        window = self._window
        self._forgotten.known()  # the error says enough
        if added is None:
            return
        if window is None or (window.state is OPEN and not added):
            loop.spent = False
            if window is not None and window.untouched:
                self.discard()  # there is no window yet
        elif window.state is not OPEN or not isinstance(error, BigBatchError):  # ours leave it as it is
            window.fail(error)

    def flush(self) -> Update | None:
        """End the window early and make its update; None where no window is open."""
        if self._window is None:
            return None
        update = self._close(self._window)
        if self._others_go_on and not self._loop.of_over:
            raise WindowError(_OTHERS_GO_ON)
        return update

    def _close(self, window: Window, *, checked: bool = False) -> Update:
        self._promised = self._loop.of_over and not self._loop.last
        self._admission.note_step()
        try:
            with self._team.telling_of_failure(window.gradients.device):
                update = window.close(checked=checked, goes_on=self._promised)
            self._others_go_on, self._loop.last = window.others_go_on, False
            self._forget()
        except BaseException as error:
            self._forgotten.known()  # the error says enough
            if self._stepper.began:
                self._stepper.give_up(error)
            if window.state is CLOSED:  # Ctrl-C came after the step
                self._forget()
            raise
        return update

    def _forget(self) -> None:
        """Go on without a window: it is closed."""
        self._window, self._resumed = None, False
        self._forgotten.closed()
        if not self._team.is_alone:
            self._prepare()

    def _prepare(self) -> None:
        """Say whether the next micro-batch is its window's last, before its forward."""
        passes = self._window.passes if self._window is not None else 0
        self._team.prepare(last=self._loop.last or passes + 1 == self._steps)

    def discard(self) -> None:
        """Drop the open window and its gradients; the model and the optimizer are as before it.

        Where its step had begun and failed, they may not be: the error that it failed with says so.
        """
        if self._window is not None:
            self._loop.spent = self._loop.spent and self._window.state is OPEN  # or its batch may be tried again
            self._window.discard()
        self._forget()

    __reduce_ex__ = refuse_copy

    def before_step(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call `hook()` before each step, when `.grad` holds the big batch's gradient, corrected and not yet clipped.

        It may read or change the gradients. Returns a function that removes it.
        """
        key = object()
        self._stepper.hooks[key] = hook

        def remove() -> None:
            self._stepper.hooks.pop(key, None)

        return remove

    def observe(self, witness: Witness) -> Callable[[], None]:
        """Show each window to a witness, such as a `GradientNoise`; returns a function that ends it."""
        return self._stepper.observe(witness)

    def state_dict(self) -> dict[str, Any]:
        """Return the open window, if any: its gradients and totals, in mid-window too.

        Not in it: the model, the optimizer, the scheduler, the scaler and the loader's position. Save those beside it.
        Over several ranks a window is not saved: save between two updates.
        """
        if self._window is not None and not self._team.is_alone:
            msg = (
                f"a window is open, with {self._window.micro_batches} micro-batches on this rank, and its gradients "
                "are this rank's own: another number of ranks could not go on with it.\n"
                "Save between two updates, when accumulator.backward(loss) has returned one, or flush() first."
            )
            raise StateError(msg)
        window = None if self._window is None else self._window.state_dict()
        self._forgotten.known()
        return {"version": STATE_VERSION, "steps": self._steps, "window": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved window. Load the model and the optimizer first, then give `over` the remaining batches.

        An open window was weighed for its own `steps`, which come with it. Where none was, `steps` stay as they are
        here: they are one rank's, and another number of ranks takes others.
        """
        if not isinstance(state, dict) or not {"version", "steps", "window"} <= state.keys():
            msg = "this is not the state_dict() of an Accumulator: it should hold version, steps and window"
            raise StateError(msg)
        if state["version"] != STATE_VERSION:
            msg = f"this state_dict has version {state['version']}; this bigbatch reads version {STATE_VERSION}"
            raise StateError(msg)
        if state["window"] is not None and not isinstance(state["window"], dict):
            msg = f"the window of this state_dict is a {type(state['window']).__name__}, not a dict"
            raise StateError(msg)
        if state["window"] is not None and not self._team.is_alone:
            raise StateError(_WINDOW_OF_ONE)
        steps = arguments.steps(state["steps"])
        if state["window"] is None:
            self.discard()
        else:
            now = self._window
            with setting_aside(all_parameters(self._stepper.optimizers)):  # a state that is refused changes nothing
                window = Window(self._stepper, steps, self._gradient_dtype)
                try:
                    window.load_state_dict(state["window"])
                except BaseException:
                    self._stepper.window = None if now is None else weakref.ref(now)
                    raise
            if now is not None:
                now.state = CLOSED
            self._window, self._resumed, self._steps = window, True, steps
            self._forgotten.opened(window.ledger)
            self._forgotten.known()  # it can be loaded again

    def _read(self, loss: Tensor, count: object) -> list[Term]:
        if count is not None:
            kind, number = checked_count(count)
            if self._to_compare and kind == "mean":
                self._compare_count(loss, number)
            self._admission.skip_reading(loss)
            return [Term(None, kind, number, "count=", None)]
        reader = self._admission.reader
        terms = reader.read(loss)
        if reader.fresh and not self._warned:
            divided = arguments.divided_message(loss, terms, self._steps, self._team.size)
            if divided is not None:
                self._warned = True
                warnings.warn(divided, stacklevel=3)
        return terms

    def _compare_count(self, loss: Tensor, given: Count) -> None:
        """Warn, once, where counts that come with losses are not in proportion to those that the graphs show."""
        left, self._to_compare = self._to_compare - 1, 0
        try:
            with warnings.catch_warnings():  # they ask for the count, which is given
                warnings.simplefilter("ignore")
                (term,) = self._admission.reader.read(loss)
        except (BigBatchError, ValueError):  # several terms, or one that cannot be read: that is what a count is for
            return
        counts = (given, term.count)
        if term.kind != "mean" or any(isinstance(each, Tensor) and not each.is_cpu for each in counts):
            return
        given, shown = map(float, counts)
        self._to_compare, first = left, (self._window and self._compared) or (given, shown)
        self._compared = first if first[1] else None
        if not math.isclose(given * first[1], first[0] * shown, rel_tol=1e-6):
            self._to_compare = 0
            warnings.warn(
                f"count= is {first[0]:g} and {given:g} in two micro-batches whose losses are means over {first[1]:g} "
                f"and {shown:g} ({term.name}), so the gradient is not the big batch's.\n"
                "Leave count= out: it is read from the loss. Ignore this where you want other weights.",
                stacklevel=4,
            )

    def _warn_of_moving(self) -> None:
        """Name the layers that move once per micro-batch, at the first backward of several."""
        moving = (
            arguments.spectral_norms(self._admission.models) if self._steps > 1 and not self._warned_of_moving else []
        )
        self._warned_of_moving = True
        if moving:
            warnings.warn(
                f"spectral_norm of layer '{moving[0]}' ({len(moving)} in all) is in training mode: its power iteration "
                "runs once per micro-batch, where the big batch would run it once, so the gradients differ.\n"
                "For the big batch's, call layer.eval() after the first backward of a window and layer.train() before "
                "the next window; or accept the difference.",
                stacklevel=3,
            )

    def _refuse_questions(self, loss: Tensor) -> None:
        """Refuse a loss that may have asked for other micro-batches, perhaps for a value without a place in its graph.

        In `over` it may since its batch was given out, else since the last backward, with gradients enabled.
        """
        if self._loop.of_over:
            if times_asked() != self._loop.asked:
                raise refusals.alone()
        elif times_asked(in_training=True) != self._asked_in_training or (self._refused and self._refused() is loss):
            self._asked_in_training, self._asked_anywhere = times_asked(in_training=True), -1  # look again
            self._refused = weakref.ref(loss)
            raise refusals.alone() if arguments.scan(loss).alone else refusals.asked_since()
        self._asked_anywhere, self._refused = asked_anywhere[0], None

    def _refuse_second_backward(self) -> None:
        """Refuse another loss of a batch that `over` gave out once."""
        if self._loop.spent:
            msg = (
                "backward was called a second time for one batch of `over`: a batch is one micro-batch of the window.\n"
                "Add its losses and call it once:  accumulator.backward(loss_real + loss_fake)"
            )
            raise WindowError(msg)

    def _known_totals(self) -> tuple[Count, ...] | None:
        if self._counts is not None and self._loop.totals is None:
            msg = "counts= needs the batches of a window in advance: iterate over accumulator.over(loader)"
            raise WindowError(msg)
        return self._loop.totals

    def _refuse_open_window(self) -> None:
        if self._window is None or self._resumed:
            return
        self._window.check()
        msg = (
            f"a window is still open, with {self._window.micro_batches} of {self._steps} micro-batches, left by break "
            "or an exception.\n"
            "Make its update with accumulator.flush(), or drop it with accumulator.discard(); then go on."
        )
        raise WindowOpen(msg)

    def _open(self) -> Loop:
        """Begin an `over`; a window that was loaded is gone on with, once."""
        self._refuse_open_window()
        self._resumed, self._loop = False, Loop(of_over=True, spent=True)
        self._team.begin_loop()
        self._promised = True  # those of other ranks that begin, too, expect one window at least
        return self._loop

    def _begin(self, loop: Loop, *, has_batches: bool) -> None:
        """At the first batch of an `over`, or where there is none, hear of other ranks whether theirs begins, too."""
        self._team.check_batches(all_parameters(self._stepper.optimizers)[0].device, has_batches=has_batches)
        loop.begun = True

    def _refuse_backward_by_hand(self) -> None:
        """A batch went by without our backward: was it loss.backward() that the loop called?"""
        if self._window is not None:
            return
        if self._stepper.by_hand or any(p.grad is not None for p in all_parameters(self._stepper.optimizers)):
            msg = (
                "a batch of `over` had no accumulator.backward(loss), and "
                f"{'optimizer.step() was called' if self._stepper.by_hand else 'the parameters have gradients'}: the "
                "loop has a backward of its own, loss.backward() or accelerator.backward(loss), and nothing is "
                "accumulated.\n"
                "Replace it, and what steps and clears:  accumulator.backward(loss)"
            )
            raise WindowDisturbed(msg)

    def _end(self, loop: Loop) -> None:
        """Hear that all batches were given out; the last one may have made no backward."""
        if not loop.begun:
            self._begin(loop, has_batches=False)
        if not loop.spent:
            self._refuse_backward_by_hand()
            self._team.check_last_batch()
        loop.last = True
        self.flush()
        while not (self._team.is_alone or self._team.sharded) and (self._promised or self._others_go_on):
            loop.last = True
            # Others have batches left: their windows need this rank, which has none.
            nothing = None if self._counts is None else ()
            window = self._window = Window(self._stepper, self._steps, self._gradient_dtype, nothing)
            try:
                self._close(window)
            except BaseException:
                if window.untouched:  # nothing of this rank is in it
                    self.discard()
                raise
        if self._loop is loop:
            self._loop = Loop()

    def _most(self, mine: int) -> int:
        return self._team.most(mine, all_parameters(self._stepper.optimizers)[0].device)

    def _leave(self, loop: Loop) -> None:
        """End an `over` by `break` or an error; another one may have begun since."""
        if self._loop is loop:
            self._loop = Loop()

    def _announce(self, loop: Loop, last: bool, totals: tuple[Count, ...] | None) -> None:  # noqa: FBT001 - by Over
        """Hear from `over` of the next batch: whether it is the last, and what its window comes to."""
        if not loop.begun:
            self._begin(loop, has_batches=True)
        if not loop.spent:
            self._refuse_backward_by_hand()
        self._loop, loop.last, loop.totals, loop.spent = loop, last, totals, False
        self._stepper.by_hand = False
        if not self._team.is_alone:
            self._prepare()
        loop.asked, self._asked_anywhere = times_asked(), asked_anywhere[0]

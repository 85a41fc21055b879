"""Micro-batches come in, updates come out."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch import arguments
from bigbatch.distributed.discovery import team_of
from bigbatch.errors import BigBatchError, StateError, WindowError, WindowOpen
from bigbatch.loop import Loop, Needs, Over, Source, Turns, no_loop
from bigbatch.loss.count import Count, GivenCount, Term, checked_count
from bigbatch.state.scope import asked_anywhere, times_asked
from bigbatch.update import Update
from bigbatch.window.gate import Admission, Questions
from bigbatch.window.gradients import all_parameters
from bigbatch.window.hints import Forgotten
from bigbatch.window.stepper import Stepper, Witness, refuse_copy
from bigbatch.window.window import CLOSED, OPEN, Alike, Window, refuse_unfit_window

Batch = TypeVar("Batch")
STATE_VERSION = 1


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

    A loop that keeps its own backward and step has `weigh` and `settle`:

        for micro_batches in windows:
            for inputs, labels in micro_batches:
                accumulator.weigh(criterion(model(inputs), labels)).backward()
            accumulator.settle()
            optimizer.step()
            optimizer.zero_grad()

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
        """Check every argument; then watch the optimizers, and keep wrappers from reducing by themselves."""
        arguments.mesh(mesh)
        found = arguments.models(model, ranks=True)
        optimizers = arguments.optimizers(optimizer, found)
        arguments.optional(clip_norm=clip_norm, scaler=scaler, gradient_dtype=gradient_dtype, counts=counts)
        arguments.truths(skip_nonfinite=skip_nonfinite, overlap=overlap)
        arguments.one_of("batch_norm", batch_norm, "refuse", "micro")
        self._steps, self._gradient_dtype, self._counts = arguments.steps(steps), gradient_dtype, counts
        self._stepper = Stepper(
            optimizers,
            schedulers=arguments.schedulers(scheduler, optimizers),
            scaler=scaler,
            clip_norm=clip_norm,
            skip_nonfinite=skip_nonfinite,
            team=team_of(found, group, overlap=overlap, trained=all_parameters(optimizers)),
        )
        me, accepting = weakref.ref(self), 'Accumulator(..., batch_norm="micro")'
        is_one = lambda: (owner := me()) is not None and owner._loop.is_of_one()  # noqa: E731, SLF001
        self._admission = Admission(found, optimizers, batch_norm, accepting, is_one=is_one)
        self._stepper.watch()
        self._team = self._stepper.team
        self._team.serve(self)
        self._team.prepare(last=self._steps == 1)
        self._questions, self._forgotten = Questions(), Forgotten(self)
        self._window: Window | None = None
        self._alike: Alike | None = None  # how the latest loss was read, where another is recognized by it
        self._resumed = False  # a window loaded from a state_dict: the next `over` goes on with it
        self._loop: Loop = no_loop()
        self._sources: list[Source[Any]] = []  # what was read ahead of iterators that loops were left with

    @property
    def steps(self) -> int:
        """How many micro-batches make an update."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        steps = arguments.steps(steps)
        if self._window is not None and steps != self._steps:
            raise WindowOpen(
                f"steps cannot change from {self._steps} to {steps} inside a window.",
                fix="steps set between windows, after accumulator.flush() or when backward has returned an Update",
            )
        self._steps = steps
        self._prepare()

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
        needs = Needs(
            remaining=lambda: self.remaining,
            counts=self._counts,
            most=(lambda mine: self._team.most(mine, self._device)) if self._team.sharded else None,
            the_last=self._team.in_common or self._counts is not None,
        )
        return Over(loader, needs, partial(self._run, needs))

    def backward(self, loss: Tensor, count: GivenCount | None = None) -> Update | None:
        """Add one micro-batch's gradient; returns the Update that it completed, or None.

        `count` says what the loss was averaged over where its graph cannot tell; see `counted`.
        """
        loop, window, admission, added = self._loop, self._window, self._admission, None
        try:
            alike = self._alike if count is None else None
            number = None if alike is None else self._count_alike(alike, loop, loss)
            terms = [] if number else self._admitted(loop, loss, count)
            loop.spent, added = loop.of_over, False
            if window is None:
                window = self._opened()
            if number and alike is not None:
                window.add_alike(loss, number, alike)
            else:
                again = count is None and self._counts is None and not admission.is_wary
                reading, own = admission.reader.plain if again else None, admission.only_own
                with admission.sparing_others():
                    if loop.repeated:
                        window.pass_by(loss, only_own=own)
                    else:
                        self._alike = window.add(loss, terms, only_own=own, reading=reading)
            window.state, added = OPEN, True
            if loop.last or window.passes >= self._steps:
                return self._close(window, checked=True)
        except BaseException as error:
            self._fail(loop, error, added=added)
            raise
        if not self._team.is_alone:
            self._prepare()
        return None

    def weigh(self, loss: Tensor, times: float = 1.0) -> Tensor:
        """Return the same loss, whose next backward, whoever runs it, adds this micro-batch's share of the gradient.

        `times` undoes a division by others: `accumulator.weigh(loss / 4, times=4)`. `settle` ends the window.
        """
        loop, window = self._loop, self._window
        if window is not None:
            window.check()  # a loss that was weighed before had its backward
        self._alike = None
        undivided = loss if times == 1.0 or not isinstance(loss, Tensor) else loss * times
        terms = self._admitted(loop, undivided, None)
        if window is None:
            window = self._opened()
        try:
            window.weigh(loss, terms, times)
        except BaseException:
            if window.untouched:
                self.discard()
            raise
        loop.spent = loop.of_over
        return loss

    def settle(self) -> Update | None:
        """End a window of `weigh`: `.grad` is the big batch's gradient, of all ranks, and nothing is stepped.

        Where nothing was counted there is no gradient, and `update.skipped`. None where no window is open.
        """
        return None if self._window is None else self._close(self._window, stepping=False)

    def _count_alike(self, alike: Alike, loop: Loop, loss: Tensor) -> float | None:
        """Return the count of a loss that was read as the latest, a plain mean; None: it is to be checked."""
        admission = self._admission
        if (
            alike.reading is not admission.reader.plain
            or loop.spent
            or type(loss) is not Tensor
            or alike.dtype is not loss.dtype
            or not loss.is_cpu
            or asked_anywhere[0] != self._questions.anywhere
        ):
            return None
        if self._window is None:
            self._look_around()
            if self._stepper.witness is not None:
                return None
        return None if admission.batch_norms else admission.reader.count_again(loss)

    def _admitted(self, loop: Loop, loss: Tensor, count: GivenCount | None) -> list[Term]:
        """Return the terms of a loss that may be added, or refuse it."""
        admission, hints, given = self._admission, self._admission.hints, None
        arguments.loss(loss)
        if asked_anywhere[0] != self._questions.anywhere or loop.spent:
            self._questions.check(loss, loop.asked if loop.of_over else None)
        if loop.spent:
            raise WindowError(
                "backward was called a second time for one batch of `over`: a batch is one micro-batch of the window.",
                fix="accumulator.backward(loss_real + loss_fake), once",
            )
        if self._window is None:
            self._look_around()
        if count is not None:
            kind, number = checked_count(count)
            if hints.to_compare and kind == "mean":
                hints.compare_count(admission.reader, loss, number, first_of_window=self._window is None)
            given = Term(None, kind, number, "count=")
        terms = admission.admit(loss, self._stepper.scaler, given)
        if given is None and admission.reader.fresh:
            hints.check_division(loss, terms, self._steps, self._team.size)
        if admission.others:
            admission.refuse_changed(loss)
        return terms

    def _look_around(self) -> None:
        """Before a window: look up BatchNorm and other layers, and hooks on gradients."""
        self._admission.open()
        if self._steps > 1 and not self._admission.hints.saw_layers:
            self._admission.hints.check_layers(self._admission.models)
        self._admission.warn_of_hooks(several=self._steps > 1 or not self._team.is_alone)

    def _opened(self) -> Window:
        if self._counts is not None and self._loop.totals is None:
            raise WindowError("counts= needs the batches of a window in advance: iterate over accumulator.over(loader)")
        window = self._window = Window(self._stepper, self._steps, self._gradient_dtype, self._loop.totals)
        self._forgotten.ledger = window.ledger
        return window

    def _fail(self, loop: Loop, error: BaseException, *, added: bool | None) -> None:
        """A backward has failed: it was refused, perhaps before it began, or nobody can tell how far it came."""
        window = self._window
        self._forgotten.told()  # the error says enough
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
        if self._team.others_go_on and not self._loop.of_over:
            raise WindowError(
                "this rank has left its loop by break, and others go on: each of their windows would wait for it.",
                fix="Break on all ranks in the same window, or on none: a rank whose loader has ended takes part by "
                "itself",
            )
        return update

    def _close(self, window: Window, *, checked: bool = False, stepping: bool = True) -> Update:
        loop = self._loop
        loop.promised = loop.of_over and not loop.last
        try:
            if self._team.is_alone:
                update = window.close(checked=checked, stepping=stepping)
            else:
                with self._team.telling_of_failure(window.gradients.device):
                    update = window.close(checked=checked, goes_on=loop.promised, stepping=stepping)
            loop.last = False
            self._forget()
        except BaseException as error:
            self._forgotten.told()  # the error says enough
            if self._stepper.began:
                self._stepper.give_up(error)
            if window.state is CLOSED:  # Ctrl-C came after the step
                self._forget()
            raise
        return update

    def _forget(self) -> None:
        self._window, self._resumed = None, False
        self._forgotten.ledger = None
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
        self._alike = None
        self._forget()

    __reduce_ex__ = refuse_copy

    def before_step(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call `hook()` before each step, when `.grad` holds the big batch's gradient, corrected and not yet clipped.

        It may read or change the gradients. Returns a function that removes it.
        """
        return self._stepper.before_step(hook)

    def observe(self, witness: Witness) -> Callable[[], None]:
        """Show each window to a witness, such as a `GradientNoise`; returns a function that ends it."""
        return self._stepper.observe(witness)

    def state_dict(self) -> dict[str, Any]:
        """Return the open window, if any: its gradients and totals, in mid-window too.

        Not in it: the model, the optimizer, the scheduler, the scaler and the loader's position. Save those beside it.
        Over several ranks a window is not saved: save between two updates.
        """
        if self._window is not None and not self._team.is_alone:
            raise StateError(
                f"a window is open, with {self._window.micro_batches} micro-batches on this rank, and gradients of its "
                "own.",
                fix="a checkpoint between two updates, when accumulator.backward(loss) has returned one, or flush()",
            )
        window = None if self._window is None else self._window.state_dict()
        self._forgotten.told()
        return {"version": STATE_VERSION, "steps": self._steps, "window": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved window. Load the model and the optimizer first, then give `over` the remaining batches.

        An open window was weighed for its own `steps`, which come with it. Where none was, `steps` stay as they are
        here: they are one rank's, and another number of ranks takes others.
        """
        is_ours = isinstance(state, dict) and {"version", "steps", "window"} <= state.keys()
        if not is_ours or state["version"] != STATE_VERSION:
            raise StateError(
                "this is not the state_dict() of an Accumulator: it should hold version, steps and window.",
                found=f"version {state['version']}, not {STATE_VERSION}" if is_ours else type(state).__name__,
            )
        saved = state["window"]
        if saved is not None and not self._team.is_alone:
            raise StateError(
                "this state_dict holds an open window of one process: every rank would add its gradients once more.",
                fix="that window in one process, and a checkpoint between two updates, which loads on any number of "
                "ranks",
            )
        steps = self._steps if saved is None else arguments.steps(state["steps"])
        if saved is not None:
            refuse_unfit_window(saved, self._stepper, self._gradient_dtype)
        self.discard()
        if saved is None:
            return
        window = self._window = Window(self._stepper, steps, self._gradient_dtype)
        window.load_state_dict(saved)
        self._resumed, self._steps = True, steps
        self._forgotten.ledger = window.ledger
        self._forgotten.told()  # it can be loaded again

    def _refuse_open_window(self) -> None:
        if self._window is None or self._resumed:
            return
        self._window.check()
        raise WindowOpen(
            f"a window is still open, with {self._window.micro_batches} of {self._steps} micro-batches, left by break "
            "or an exception.",
            fix="accumulator.flush() makes its update, accumulator.discard() drops it; then go on",
        )

    @property
    def _device(self) -> torch.device:
        return all_parameters(self._stepper.optimizers)[0].device

    def _run(self, needs: Needs, over: Over[Batch], loader: Iterable[Batch]) -> Iterator[Batch]:
        """Give out the batches of an `over`; a window that was loaded is gone on with, once."""
        self._refuse_open_window()
        loop = self._loop = over.loop = Loop(asked=times_asked())
        source: Source[Batch] | None = None
        self._resumed = False
        try:
            if isinstance(loader, Over):
                turns: Turns[Batch] = loader.turns(loop)
            else:
                source = next((each for each in self._sources if each.iterator is loader), None)
                if source is None:
                    source = Source(loader, needs)
                    self._sources.append(source)
                turns = source.turns(loop)
            for batch, last, totals in turns:
                try:
                    self._announce(loop, last, totals)
                except BaseException:  # it is not given out: an iterator would not give it again
                    if source is not None and source.iterator is loader and not loop.repeated:
                        source.held.appendleft(batch)
                    raise
                loop.batch = batch
                yield batch
            self._end(loop)  # nothing comes after it: an error would not tell of its update
        except BaseException:  # also GeneratorExit, of `break`
            if self._loop is loop:  # another one may have begun since
                self._loop = no_loop()
            raise
        finally:
            loop.batch = None
            if source in self._sources and not (source.iterator is loader and source.held):
                self._sources.remove(source)

    def _announce(self, loop: Loop, last: bool, totals: tuple[Count, ...] | None) -> None:  # noqa: FBT001 - by Over
        """Note the next batch of an `over`: whether it is the last, and what its window comes to."""
        if not loop.begun:
            loop.begun = True
            self._team.begin_loop(self._device, has_batches=True)
        if not loop.spent and self._window is None:
            self._stepper.refuse_backward_by_hand()
        self._loop, loop.last, loop.totals, loop.spent = loop, last, totals, False
        if self._questions.anywhere != asked_anywhere[0]:
            loop.asked, self._questions.anywhere = times_asked(), asked_anywhere[0]
        self._stepper.by_hand = False
        if not self._team.is_alone:
            self._prepare()

    def _end(self, loop: Loop) -> None:
        """All batches were given out; the last one may have made no backward."""
        if not loop.begun:
            loop.begun = True
            self._team.begin_loop(self._device, has_batches=False)
        if not loop.spent:
            if self._window is None:
                self._stepper.refuse_backward_by_hand()
            self._team.check_last_batch()
        loop.last, nothing = True, None if self._counts is None else ()
        after = no_loop()  # made now: an error after the last update would not tell of it
        self.flush()
        while not (self._team.is_alone or self._team.sharded) and (loop.promised or self._team.others_go_on):
            window = self._window = Window(self._stepper, self._steps, self._gradient_dtype, nothing)
            loop.last = True
            try:
                self._close(window)
            except BaseException:
                if window.untouched:  # nothing of this rank is in it
                    self.discard()
                raise
        if self._loop is loop:  # another one may have begun since
            self._loop = after

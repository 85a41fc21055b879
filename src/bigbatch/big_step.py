"""A big batch comes in, an update comes out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.split import Division, Padding, joined
from bigbatch.batch.transfer import Mover
from bigbatch.distributed.discovery import team_of
from bigbatch.distributed.ranks import OthersTryAgain, is_of_the_wire
from bigbatch.distributed.team import Team
from bigbatch.errors import (
    BatchError,
    ConfigurationError,
    SeveralCounts,
    StateError,
    WindowBroken,
    WindowError,
    spoken_to_step,
)
from bigbatch.execute.execution import Divider, Execution, is_short, no_room, remedy
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_check import FirstCheck
from bigbatch.lockstep.run import Together
from bigbatch.loss.count import Count
from bigbatch.memory.sizes import Sizes
from bigbatch.options import Options, checked_loss_fn, checked_options, checked_size, refuse_lazy
from bigbatch.state import scope
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import Buffers, Snapshot, devices_of, untouched, warn_of_written
from bigbatch.update import Update
from bigbatch.window.gate import Admission
from bigbatch.window.stepper import Stepper, Witness, refuse_copy
from bigbatch.window.window import OPEN, Window

STATE_VERSION = 1
_COUPLED = "samples are coupled (BatchNorm in training mode, or across in the loss or the model)"
_Made = tuple[Update, Buffers, list[str]]  # buffers as they were, and the names of those that forwards have changed
_ALONE = "This rank cannot try again alone: others wait for it, or have gone on. Nothing was stepped here."
_RANKS_WAIT = "ranks wait for each other (a sharded model, BatchNorm in training mode, `across`)"
_ALL_RANKS = "every pass through a model that is sharded with fully_shard needs all ranks"


class BigStep:
    """Make one update of one big batch, in the memory there is, with exactly the big batch's gradient.

        step = BigStep(model, optimizer, loss_fn, clip_norm=1.0)       # loss_fn(model, batch) -> loss
        for batch in loader:                                           # 4096 samples, on the host
            update = step(batch)

    It replaces, and unlike it never runs out of memory for a batch that is too large:

        for batch in loader:
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    `model` and `optimizer` are one or a sequence each; the gradient's norm is then one over all of them. `loss_fn` gets
    the model (or models) as given here and a micro-batch of the batch's own structure, on the model's device. It may
    run more than once for the same samples, so it should change no state outside the model.

    Args:
        model: what is trained, on its device.
        optimizer: whose parameters get gradients; a loss leaves all others alone.
        loss_fn: returns the loss, or the loss and extras: tensors per sample or per micro-batch, which come back
            joined as `Update.extras`. Where it is not given, `model(**batch).loss`.
        micro_batch_size: the most samples that go through the model at once; "auto" finds what fits and is fast.
        memory: what the process may use on the device: bytes, "20GiB", or a fraction of all there is. Where it is not
            given, what is free.
        clip_norm: the largest norm of the big batch's gradient. `math.inf` reports the norm and clips nothing.
        scheduler: stepped once per real update, not after a skipped one.
        scaler: unscaled, stepped and updated once per step; return the loss unscaled.
        options: what few need.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        micro_batch_size: int | Literal["auto"] = "auto",
        memory: float | str | None = None,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        options: Options | None = None,
    ) -> None:
        self._options = options = checked_options(options)
        with spoken_to_step():
            self._models = arguments.models(model, ranks=True)
            refuse_lazy(self._models)
            optimizers = arguments.optimizers(optimizer, self._models)
            arguments.optional(scaler=scaler, clip_norm=clip_norm)
            self._stepper = Stepper(
                optimizers,
                schedulers=arguments.schedulers(scheduler, optimizers),
                scaler=scaler,
                clip_norm=clip_norm,
                skip_nonfinite=options.skip_nonfinite,
                team=team_of(self._models, options.group),
            )
        self._team, loss_fn = self._stepper.team, checked_loss_fn(loss_fn)
        self._mover = Mover(_device(self._models, self._team))
        self._devices = devices_of(self._models) | {self._mover.device}
        size = checked_size(micro_batch_size, options, self._mover.device, sharded=self._team.sharded)
        # Where every pass needs all ranks, those with batches of other sizes would compare another number of times.
        checked = replace(options, check=options.check and not self._team.sharded)
        accepting = 'BigStep(..., options=Options(batch_norm="micro"))'
        self._admission = Admission(self._models, optimizers, options.batch_norm, accepting, divisors=checked.check)
        captured = options.cuda_graph
        self._runner = Runner(model, loss_fn, self._admission, self._stepper, cuda_graph=captured)
        self._execution = Execution(graph_steps=captured, graph_windows=captured)  # as it was found to be right
        self._sizes = Sizes(size, memory, self._mover.device)
        self._divider = Divider(self._models, optimizers, self._sizes, options, self._mover)
        self._check = FirstCheck(self._models, self._runner, self._mover, checked)
        meet = options.batch_norm == "exact"
        self._together = Together(self._models, self._runner, self._mover.device, options.activations, norms_meet=meet)
        self._buffers: Buffers | None = None  # as they were, and which of them move
        self._shared: frozenset[str] = frozenset()  # leaves of the batch that all samples share
        self._told_of_buffers = False  # that a forward writes to some
        self._cut_again = False  # whether memory has run out before a batch was cut
        self._padding: Padding | None = None
        self._stepper.watch()
        self._team.serve(self)

    def __call__(self, batch: Any) -> Update:
        """Make one update of a whole batch.

        Over several ranks each gives its own part; None where it has none in this update.
        """
        return self._update(batch, stepping=True)

    def gradients(self, batch: Any) -> Update:
        """Leave the big batch's gradient in `.grad`, and the step to the caller.

            update = step.gradients(batch)
            optimizer.step()
            optimizer.zero_grad()

        It is not clipped, and times the scale of a `scaler`: unscale, clip and step as in any loop, and clear it before
        the next batch. All of them are None where nothing was counted; `update.skipped` says so.
        """
        return self._update(batch, stepping=False)

    __reduce_ex__ = refuse_copy

    def _update(self, batch: Any, *, stepping: bool) -> Update:
        """Make the update, or its gradient alone; once a step has begun, an error says how far it came."""
        if scope.worker() is not None:
            raise WindowError(
                "a BigStep was called inside of another's loss_fn or model, where micro-batches run in lock-step.",
                fix="inner(batch); outer(batch)",
            )
        self._stepper.rest()
        try:
            with self._team.telling_of_failure(self._mover.device), spoken_to_step():
                if batch is None and not self._team.is_alone:
                    return self._empty(stepping=stepping)
                update, before, written = self._made(batch, stepping=stepping)
            # The optimizer has stepped: what fails from here on must not make the step again.
            self._mover.settle()
            self._check.passed(stepped=update._skipped is not True)  # noqa: SLF001 - no device is waited for
            if written and not self._told_of_buffers:
                self._told_of_buffers = True
                warn_of_written(written)
            self._buffers = before.settle()
        except BaseException as error:
            if self._stepper.began:
                self._stepper.give_up(error)
            raise
        return update

    def _empty(self, *, stepping: bool) -> Update:
        """Take part in an update without samples of one's own."""
        if self._team.sharded:
            fix = "samples without targets that count:  labels.fill_(-100)"
            raise BatchError(f"this rank has no samples in this update, and {_ALL_RANKS}.", fix=fix)
        window = Window(self._stepper, 1, self._options.gradient_dtype, () if self._execution.count_first else None)
        try:
            return window.close(stepping=stepping)
        except SeveralCounts:
            if self._execution.count_first:
                raise
        except WindowError as error:
            self._admission.open()
            why, fix = str(error), ""
            if self._needs_lockstep():
                why = f"{_COUPLED}, so that ranks meet in the midst of a batch. Nothing was stepped."
                fix = "a part of each batch for every rank, batch[rank::size]; leave out a batch of fewer samples"
            raise WindowError(f"this rank has no samples in this update, and {why}", fix=fix) from error
        finally:
            window.discard()
        self._execution = replace(self._execution, count_first=True)
        return self._empty(stepping=stepping)

    def _made(self, batch: Any, *, stepping: bool) -> _Made:
        """Make the update, in as many tries as there are remedies for what goes wrong."""
        whole = Batch.of(batch, collate=self._options.collate, shared=self._shared)
        self._shared, self._cut_again = whole.shared, False
        while True:
            division: Division | None = None
            self._mover.at = None
            try:
                division = self._divided(whole)
                return self._attempt(division, stepping=stepping)
            except BaseException as error:
                better = self._better(error, division)
                if better is None:
                    raise
                self._execution = better
                self._runner.follow(better)

    def _divided(self, whole: Batch) -> Division:
        admission = self._admission
        admission.open()
        lockstep = self._needs_lockstep()
        admission.run_side_by_side(lockstep)
        if self._team.sharded and lockstep:
            fix = "DistributedDataParallel, BatchNorm in eval mode (layer.eval()), or GroupNorm"
            raise ConfigurationError(f"{_COUPLED}, and {_ALL_RANKS}: micro-batches cannot wait in its midst.", fix=fix)
        admission.look()
        division = self._divider.divide(whole, self._run_one, lockstep=lockstep)
        admission.warn_of_hooks(several=len(division) > 1 or not self._team.is_alone)
        return division

    def _needs_lockstep(self) -> bool:
        return self._execution.lockstep or self._admission.needs_lock_step()

    def _run_one(self, micro_batch: Any, division: Division) -> None:
        side_by_side = bool(self._admission.side_by_side)
        run = partial(self._runner.try_once, ragged=division.longest is not None, side_by_side=side_by_side)
        if side_by_side:
            self._together.rehearse(run, micro_batch, division.sizes[0])
        else:
            run(micro_batch)

    def _better(self, error: BaseException, division: Division | None) -> Execution | None:
        """Return how to try again; None where there is no remedy, or no other try is allowed.

        None is, once the step has begun or traces are left, or other ranks have heard of this window.
        """
        now, team, short = self._execution, self._team, is_short(error)
        if short and self._stepper.began:
            raise no_room(
                error,
                "in the optimizer's own step",
                "It may have changed some parameters and some of its state, so the step is not made again: load both "
                "from a checkpoint.",
                "a smaller micro_batch_size or memory=, foreach=False, or an optimizer with less state",
            ) from error
        if self._stepper.began or isinstance(error, WindowBroken):
            return None
        if isinstance(error, OthersTryAgain):
            let_go(error)
            return now
        if isinstance(error, SeveralCounts) and not now.count_first:
            if team.sharded:
                return None
            team.tell_of_several(self._mover.device)
        if not isinstance(error, NeedsLockStep | SeveralCounts):
            # Where others wait for this rank in the midst of a window, it cannot try again alone.
            inside = not team.is_alone and (team.elsewhere or team.sharded or is_of_the_wire(error))
            if short and (team.spoken or (inside and division is not None)):
                where = (
                    "in adding up the gradients of all ranks" if team.spoken else f"in a pass for which {_RANKS_WAIT}"
                )
                fix = "a smaller micro_batch_size or memory=, or activation checkpointing; and go on from a checkpoint"
                raise no_room(error, where, _ALONE, fix) from error
            if team.spoken or inside:
                return None
        side_by_side = bool(self._admission.side_by_side)
        better = remedy(now, error, side_by_side=side_by_side)
        return better or (now if self._has_room(error, division, side_by_side=side_by_side) else None)

    def _has_room(self, error: BaseException, division: Division | None, *, side_by_side: bool) -> bool:
        """Make room for another try where memory has run out, or have activations wait elsewhere."""
        short = is_short(error)
        # Captured windows hold a window's memory, and it may fit without them.
        found = (short and self._runner.forget()) or (
            side_by_side and self._together.where.fall_back(error, out_of_memory=short)
        )
        if not found and (not short or (division is None and self._cut_again)):
            return False
        if not found and division is not None:
            self._divider.shrink(division, error, lockstep=side_by_side)
        elif not found:
            self._cut_again = True  # packing may fit once short cuts have let go
        let_go(error)
        team: Any = self._team
        if not team.is_alone and side_by_side:
            team.try_again(self._mover.device)  # they are on their way through this window, and begin anew, too
        return True

    def _attempt(self, division: Division, *, stepping: bool) -> _Made:
        """Make the update, or leave everything as it was."""
        division.batch.refuse_changed()  # by a probe, or by an attempt before
        before = Snapshot(self._models, self._buffers, self._devices)
        window: Window | None = None
        totals: tuple[Count, ...] | None = None
        side_by_side = bool(self._admission.side_by_side)
        try:
            if side_by_side:
                self._admission.look_at_compiled()
            looked = self._check(division, self._together.each if side_by_side else None)
            if self._execution.count_first and not side_by_side:
                with untouched(self._models, before=self._buffers):
                    totals = self._runner.totals(self._mover.micro_batches(division))
            division.batch.refuse_changed()  # by counting or checking
            with self._runner.window(ragged=division.longest is not None, side_by_side=side_by_side):
                window = Window(self._stepper, len(division), self._options.gradient_dtype, totals)
                micro_batches = self._mover.micro_batches(division)
                if side_by_side:
                    self._admission.side_by_side = len(division)
                    shape = str(division.batch.signature())
                    self._together.make_room(lambda: self._first(division), division.sizes, shape, self._sizes.budget())
                    extras = self._together.run(window, micro_batches, division.sizes)
                else:
                    extras = self._one_by_one(window, micro_batches, division)
                together = joined(extras, division.sizes, division.order)  # takes memory: before the step
                looks = looked and len(division) > 1
                written = before.buffers.written(self._together.statistics) if looks else []
                update = window.close(stepping=stepping)
                if not stepping and self._options.cuda_graph:  # the next replay writes to the same places
                    for p in window.gradients.parameters:
                        p.grad = None if p.grad is None else p.grad.clone()
        except BaseException as error:
            with ExitStack() as undone:  # from the last to the first, whatever fails in another
                if not self._stepper.began:
                    undone.callback(before.restore)
                if window is not None:
                    undone.callback(window.discard)
                    undone.callback(window.discard)  # an interrupt may end the other at its first line
                if is_out_of_memory(error):
                    let_go(error, told=True)  # what restores takes memory, too
            raise
        self._padding = division.padding
        return replace(update, extras=together), before.buffers, written

    def _first(self, division: Division) -> Any:
        return self._mover.moved(division.micro_batch(0))

    def _one_by_one(self, window: Window, micro_batches: Iterator[Any], division: Division) -> list[Any]:
        """Run micro-batches one after the other. Through a sharded model ranks make as many passes as any has."""
        team, passes = self._team, 0
        if team.sharded:
            passes, team.elsewhere = team.most(len(division), self._mover.device), True
        extras = self._runner.run(window, micro_batches, division)
        for _ in range(passes - len(division)):  # they add nothing
            loss, _ = self._runner.loss(self._first(division))
            with self._admission.sparing_others():
                window.pass_by(loss)
            window.state = OPEN
        if not team.is_alone:
            team.elsewhere = False  # all have made them, and come to their statements
        return extras

    @property
    def padding(self) -> Padding | None:
        """How much of the latest batch was padding, where `Options(lengths=...)` is set."""
        return self._padding

    def before_step(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call `hook()` before each step, when `.grad` holds the big batch's gradient, corrected and not yet clipped.

        It may read or change the gradients. Returns a function that removes it.
        """
        return self._stepper.before_step(hook)

    def observe(self, witness: Witness) -> Callable[[], None]:
        """Show each window to a witness, such as a `GradientNoise`; returns a function that ends it."""
        if self._options.lengths is not None:
            raise ConfigurationError(
                "Options(lengths=...) sorts samples by length, so no micro-batch is a random part of its batch.",
                fix="BigStep(..., options=Options()) while you measure",
            )
        return self._stepper.observe(witness)

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found to fit. Save the model, the optimizer and all else beside it."""
        return {"version": STATE_VERSION, "sizes": self._sizes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with sizes that were found before, instead of finding them again."""
        if not isinstance(state, dict) or "sizes" not in state or state.get("version") != STATE_VERSION:
            found = repr(state.get("version")) if isinstance(state, dict) else type(state).__name__
            problem = f"this is not the state_dict() of a BigStep: it should hold version {STATE_VERSION} and sizes."
            raise StateError(problem, found=found)
        self._sizes.load_state_dict(state["sizes"])


def _device(models: Sequence[nn.Module], team: Team) -> torch.device:
    """Return where micro-batches go: to the first parameter, as a pipeline over devices begins there."""
    if team.device is not None:
        return team.device  # where shards compute: they may wait in host memory
    return next((p.device for model in models for p in model.parameters()), torch.device("cpu"))

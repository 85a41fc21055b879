"""Run the micro-batches of a window: forward, read, backward; launched one by one, or replayed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from bigbatch import arguments
from bigbatch.batch.split import Division
from bigbatch.batch.tree import mapped
from bigbatch.default_loss import own_loss
from bigbatch.errors import ConfigurationError, LossError
from bigbatch.execute.execution import Execution
from bigbatch.execute.graph_calls import ReplayedSteps, WholeWindows
from bigbatch.execute.precast import CastWeights
from bigbatch.loss.count import Count, Term, TotalOfSum
from bigbatch.state import scope
from bigbatch.state.scope import NeedsLockStep, one_after_the_other
from bigbatch.window.backward import run_backward
from bigbatch.window.gate import Admission
from bigbatch.window.gradients import all_parameters
from bigbatch.window.stepper import Stepper
from bigbatch.window.window import OPEN, Window

_LossFn = Callable[[Any, Any], Any]
_ONE_VALUE = "more than 1 value per channel"  # torch's word for BatchNorm on a single sample


class Runner:
    """Runs micro-batches of one model with one loss."""

    def __init__(
        self, model: Any, loss_fn: _LossFn | None, admission: Admission, stepper: Stepper, *, cuda_graph: bool
    ) -> None:
        self._model, self._loss_fn = model, loss_fn or own_loss
        self._models: Sequence[nn.Module] = model if isinstance(model, list | tuple) else (model,)
        self._admission, self._stepper = admission, stepper
        device = all_parameters(stepper.optimizers)[0].device
        self.steps = ReplayedSteps(self._models, device, stepper) if cuda_graph else None
        self.whole = WholeWindows(self._models, device, stepper) if cuda_graph else None
        # Replays run in Python once: launched one by one, the host takes longer for it than the device saves.
        casts = cuda_graph and CastWeights.serves(self._models, device)
        self._casting = CastWeights(stepper.optimizers) if casts else None
        self._ragged = False

    def loss(self, micro_batch: Any) -> tuple[Tensor, Any]:
        """Call the user's function: a loss, perhaps with extras."""
        alone = scope.worker() is None  # of a window that runs one after the other, for all that the loss may ask
        try:
            with one_after_the_other() if alone else nullcontext():
                found = self._loss_fn(self._model, micro_batch)
        except ValueError as error:
            if alone and self._admission.exact and _ONE_VALUE in str(error):
                raise NeedsLockStep(_ONE_VALUE) from error  # there are more beside it
            raise
        if not isinstance(found, tuple):
            return found, None
        if len(found) != 2:  # noqa: PLR2004 - a loss and extras
            raise ConfigurationError("loss_fn must return a loss, or a loss and extras.", found=f"{len(found)} values")
        # What is kept for the end of the window must not keep activations.
        return found[0], mapped(found[1], lambda _, leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

    def read(self, loss: Tensor) -> list[Term]:
        """Return what the loss was averaged over, or refuse it."""
        arguments.loss(loss)
        return self._admission.admit(loss, self._stepper.scaler)

    @contextmanager
    def window(self, *, ragged: bool, side_by_side: bool = False) -> Iterator[None]:
        """Between two updates: weights do not change inside, so what is made of them once serves all micro-batches.

        Where micro-batches are `ragged`, each has a shape of its own. Where they run side by side, several backwards
        are under way at once, and gradients take the usual way.
        """
        self._ragged = ragged
        try:
            with (None if side_by_side else self._casting) or nullcontext():
                yield
        finally:
            # An autocast around several steps would go on with copies of weights from before the update.
            torch.clear_autocast_cache()

    def run(self, window: Window, micro_batches: Iterable[Any], division: Division) -> list[Any]:
        """Add all micro-batches of a division, wherever they lie by now, to the window; returns their extras."""
        if self.steps is None:
            return [self._launched(window, micro_batch) for micro_batch in micro_batches]
        if self._casting is not None:
            self._casting.renew()
        return self.steps.run(self, window, micro_batches, division, self._launched)

    def _launched(self, window: Window, micro_batch: Any) -> Any:
        """Add one micro-batch; returns its extras."""
        with _without_plans() if self._ragged else nullcontext():
            loss, extra = self.loss(micro_batch)
            if window.untouched:  # else `add` checks: loss_fn is the user's, and may have run a backward of its own
                window.check()
            terms = self.read(loss)
            with self._adding_up(loss), self._admission.sparing_others():
                window.add(loss, terms, only_own=self._admission.only_own)
            window.state = OPEN
        return extra

    def weighed(self, window: Window, found: list[tuple[Tensor, list[Term]]]) -> list[Callable[[], None]]:
        """Weigh the losses of micro-batches that run side by side; returns each one's backward."""
        window.check()
        return window.add_together(found, only_own=self._admission.only_own)

    def totals(self, micro_batches: Iterable[Any]) -> tuple[Count, ...]:
        """Return what each term over data comes to in all micro-batches, from forwards alone."""
        rows: list[list[Term]] = []
        for micro_batch in micro_batches:
            terms = self.read(self.loss(micro_batch)[0])
            data = [replace(term, node=None, source=None, value=None) for term in terms if term.kind != "once"]
            rows += [data] if terms else []  # none of a loss of zero
        if len({tuple(term.kind for term in row) for row in rows}) > 1:
            raise LossError(
                "the loss changes within a batch: its micro-batches have different numbers of terms over data.",
                found=f"{', '.join(str(len(row)) for row in rows[:8])} terms",
                fix="every term for every micro-batch, as counted(term, n) with n = 0 where it does not apply",
            )
        return tuple(
            TotalOfSum(1.0) if column[0].kind == "sum" else sum((t.count for t in column[1:]), start=column[0].count)
            for column in zip(*rows, strict=True)
        )

    def wanted(self, window: Window) -> tuple[Tensor, ...] | None:
        """Return whose gradients a backward is for; None where it cannot choose."""
        return window.gradients.parameters if self._admission.only_own else None

    def sparing_others(self) -> AbstractContextManager[None]:
        """Leave parameters alone that are not the optimizers'."""
        return self._admission.sparing_others()

    def probes(self, limit: int) -> tuple[Tensor, ...]:
        """Return parameters whose gradients tell of all: the smallest ones, of so many bytes together."""
        every = sorted((p for p in all_parameters(self._stepper.optimizers) if p.requires_grad), key=Tensor.numel)
        ends = list(accumulate(p.numel() * max(p.element_size(), 4) for p in every))
        return tuple(every[: max(sum(end <= limit for end in ends), 1)])

    def scale(self) -> float:
        """Return what a loss is multiplied with, lest its gradients vanish in float16."""
        scaler = self._stepper.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def try_once(self, micro_batch: Any, *, ragged: bool, side_by_side: bool = False) -> None:
        """Run one micro-step as a window would, for whoever wants to know what it takes."""
        with self.window(ragged=ragged, side_by_side=side_by_side), _without_plans() if ragged else nullcontext():
            loss, _ = self.loss(micro_batch)
            with _disable_current_modes():  # a meter would see the numbers in a graph as tensors, and stumble
                self.read(loss)
            self.backward(loss, torch.ones_like(loss))

    def follow(self, execution: Execution) -> None:
        """Run from now on as an execution says."""
        if not execution.graph_windows:
            self.whole = None
        if not execution.graph_steps:
            self.steps = self._casting = None

    def forget(self) -> bool:
        """Free the memory of graphs: it has run out; returns whether windows were captured, which hold the most."""
        if self.steps is not None:
            self.steps.forget()
        return self.whole is not None and self.whole.forget()

    def backward(self, loss: Tensor, start: Tensor) -> None:
        """Add the gradient of a loss, outside of a window."""
        leaves = tuple(p for p in all_parameters(self._stepper.optimizers) if p.requires_grad)
        with self._adding_up(loss), self._admission.sparing_others():
            run_backward(loss, start, leaves if self._admission.only_own else None)

    def _adding_up(self, loss: Tensor) -> AbstractContextManager[None]:
        return self._casting.adding_up(loss) if self._casting is not None else nullcontext()

    def settings(self) -> object:
        """What a captured graph depends on beside the model and the shapes of its inputs."""
        return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), self._admission.only_own


@contextmanager
def _without_plans() -> Iterator[None]:
    """Attend without cuDNN, which plans anew for every shape: 0.1 s or more, where a whole micro-step takes 0.02 s."""
    there = torch.backends.cuda
    planned = there.cudnn_sdp_enabled() and (there.flash_sdp_enabled() or there.mem_efficient_sdp_enabled())
    try:
        if planned:
            there.enable_cudnn_sdp(enabled=False)
        yield
    finally:
        if planned:
            there.enable_cudnn_sdp(enabled=True)

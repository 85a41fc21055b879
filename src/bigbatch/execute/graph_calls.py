"""The two calls that are replayed: a micro-step, whose count and weight stay on the device, and a window in lock-step.

In lock-step the host wakes a thread at every exchange. But the order is fixed, so a window is one graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.batch.split import Division
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.graph_replay import MICRO_STEPS, WINDOWS, Call, Replayed, copied, refuse_hidden, shape_of
from bigbatch.loss.count import LOW_PRECISION, Term
from bigbatch.state.snapshot import devices_of
from bigbatch.window.stepper import Stepper
from bigbatch.window.tally import Ledger
from bigbatch.window.window import Window

if TYPE_CHECKING:
    from bigbatch.execute.micro_step import Runner

_SEVERAL = "its loss has several terms, and only one mean or sum can be captured"
_LOW = "its loss is of low precision, which cannot hold a weight; compute it in float32"


class _Step(NamedTuple):
    """What a micro-step that was captured has returned."""

    terms: list[Term]
    loss: Tensor
    extras: Any


class ReplayedSteps(Replayed):
    """The captured micro-steps of one `BigStep`."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, stepper: Stepper) -> None:
        super().__init__(models, device, MICRO_STEPS, draws=True)
        self._stepper = stepper
        # What a count is multiplied with to make the weight of a backward.
        self._unit = torch.ones((), dtype=torch.float64, device=device)

    def run(
        self,
        runner: "Runner",
        window: Window,
        micro_batches: Iterable[Any],
        division: Division,
        launch: Callable[[Window, Any], Any],
    ) -> list[Any]:
        """Replay micro-batches whose shapes have come before, and `launch` the others; returns their extras."""
        if window.ledger.totals is not None:
            raise NotCapturable(_SEVERAL)
        extras, is_set = list[Any](), False

        def prepare(step: _Step) -> None:
            nonlocal is_set
            if not is_set:
                self._set_unit(window, step.terms)
            is_set = True

        def enter(step: _Step) -> Any:
            counts = [term.count.clone() if isinstance(term.count, Tensor) else term.count for term in step.terms]
            terms = [replace(term, count=count) for term, count in zip(step.terms, counts, strict=True)]
            window.enter_replayed(terms, step.loss.clone())
            return copied(step.extras)

        call = Call(partial(launch, window), partial(self._recorded, runner), enter, prepare)
        with self.window(call, window.gradients, runner.settings()) as run:
            for micro_batch in micro_batches:
                shape = shape_of(micro_batch) if division.odd != len(extras) else ""
                extras.append(run(shape, micro_batch))
        return extras

    def _recorded(self, runner: "Runner", micro_batch: Any) -> _Step:
        """Run a micro-step whose count and weight stay on the device, as a replay computes them anew."""
        loss, extras = runner.loss(micro_batch)
        terms = runner.read(loss)
        data = [term for term in terms if term.kind != "once"]
        if len(data) != 1 or (data[0].kind == "sum" and len(terms) > 1):
            raise NotCapturable(_SEVERAL)
        if loss.dtype in LOW_PRECISION:
            raise NotCapturable(_LOW)
        refuse_hidden(extras)
        weight = self._unit * data[0].count if data[0].kind == "mean" else self._unit
        runner.backward(loss, weight.to(loss.dtype).reshape(loss.shape))
        for term in terms:
            term.node = term.source = term.value = None  # what is kept must not keep the graph alive
        return _Step(terms, loss.detach(), extras)

    def _set_unit(self, window: Window, terms: Sequence[Term]) -> None:
        """Set what counts are multiplied with in this window, without waiting for the device."""
        (term,), ledger, scaler = [term for term in terms if term.kind != "once"], window.ledger, self._stepper.scaler
        if term.kind == "sum":
            self._unit.fill_(1.0)
        else:
            if ledger.provisional is None:  # a gradient scaler is tuned to means: weights stay below 1
                about = term.about or 1.0 if isinstance(term.count, Tensor) else max(term.count, 1.0)
                ledger.provisional = 1.0 if scaler is None else about * ledger.steps
            if isinstance(ledger.provisional, Tensor):
                self._unit.copy_(1.0 / ledger.provisional)
            else:
                self._unit.fill_(1.0 / ledger.provisional)
        if scaler is not None:
            self._unit.mul_(window.scale)


class WholeWindows(Replayed):
    """The captured windows of one `BigStep`."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, stepper: Stepper) -> None:
        # A replay may draw no numbers: each micro-batch has a stream of its own.
        super().__init__(models, device, WINDOWS, draws=False)
        self._models, self._stepper = models, stepper

    def run(
        self,
        window: Window,
        micro_batches: Iterable[Any],
        launch: Callable[[Window, Iterator[Any]], list[Any]],
        *,
        settings: object,
        kind: str,
        reads: Callable[[], Sequence[Tensor]],
    ) -> list[Any]:
        """Add all micro-batches to a window by a replay, or `launch` them; returns their extras.

        Windows of another `kind` are captured for themselves; `settings` are what all depend on beside; `reads` returns
        tensors that they read and nobody else holds.
        """

        def launched(given: list[Any]) -> list[Any]:
            if self._stepper.scaler is not None and self._stepper.scaler.is_enabled():
                raise NotCapturable("a gradient scaler changes its scale, which a graph would keep")
            if len(devices_of(self._models)) > 1:
                raise NotCapturable(f"its parameters are on {len(devices_of(self._models))} devices")
            return launch(window, iter(given))

        def recorded(given: list[Any]) -> tuple[list[Any], Ledger]:
            window.recording = True  # counts are not read
            try:
                extras = launch(window, iter(given))
            finally:
                window.recording = False
            if isinstance(window.starts.residual, Tensor) or window.starts.residual != 1.0:
                raise NotCapturable(_LOW)
            refuse_hidden(extras)
            return extras, window.recorded()

        def enter(found: tuple[list[Any], Ledger]) -> list[Any]:
            window.take(found[1])
            return list(copied(found[0]))

        given = list(micro_batches)
        shape = f"{kind}; {shape_of(given)}"
        with self.window(Call(launched, recorded, enter, reads=reads), window.gradients, settings) as run:
            extras: list[Any] = run(shape, given)
        return extras

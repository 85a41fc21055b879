"""Micro-steps that are replayed: one graph for each shape, with counts and weights that stay on the device."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bigbatch.batch.split import Division
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.graph_replay import MICRO_STEPS, Replayed, copied, refuse_hidden, shape_of
from bigbatch.loss.count import LOW_PRECISION, Term
from bigbatch.window.stepper import Stepper
from bigbatch.window.window import Window

_SEVERAL = "its loss has several terms, and only one mean or sum can be captured"


class MicroStep(Protocol):
    """The parts of a micro-step."""

    def loss(self, micro_batch: Any) -> tuple[Tensor, Any]:
        """Return a loss and extras."""

    def read(self, loss: Tensor) -> list[Term]:
        """Return what the loss was averaged over."""

    def backward(self, loss: Tensor, start: Tensor) -> None:
        """Add its gradient."""


class _Recorded(NamedTuple):
    """What a micro-step that was captured has returned."""

    terms: list[Term]
    loss: Tensor
    extras: Any


class ReplayedSteps:
    """The captured micro-steps of one `BigStep`."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, stepper: Stepper, parts: MicroStep) -> None:
        """Have none yet."""
        self.graphs = Replayed(models, device, MICRO_STEPS, draws=True)
        self._stepper = stepper
        self._parts: MicroStep = weakref.proxy(parts)  # its owner: a circle would hold memory of graphs
        # What a count is multiplied with to make the weight of a backward.
        self._unit = torch.ones((), dtype=torch.float64, device=device)

    def run(
        self,
        window: Window,
        micro_batches: Iterable[Any],
        division: Division,
        add: Callable[[Any], Any],
        settings: object,
    ) -> list[Any]:
        """Replay micro-batches whose shapes have come before, and `add` the others to the same gradients.

        Returns their extras. `settings` are what captures depend on beside the model and the shapes.
        """
        if window.ledger.totals is not None:
            raise NotCapturable(_SEVERAL)
        graphs, gradients, prepared, extras = self.graphs, window.gradients, False, list[Any]()
        graphs.settle(gradients, settings)
        opened = graphs.open(gradients)

        def prepare(step: _Recorded) -> None:
            nonlocal prepared
            if not prepared:
                self._set_unit(window, step.terms)
            prepared = True

        for micro_batch in micro_batches:
            shape = shape_of(micro_batch) if division.comes_again(len(extras)) else ""
            is_known = bool(shape) and not graphs.is_new(shape)
            if is_known and opened:
                step: _Recorded = graphs.run(shape, micro_batch, self._recorded, gradients, before=prepare)
                window.enter_replayed([_with_own_count(term) for term in step.terms], step.loss.clone())
                extras.append(copied(step.extras))
            else:
                extras.append(add(micro_batch))
                if opened:
                    graphs.renew(gradients, settings)  # a table may have been made, for a longer micro-batch
        if opened:
            graphs.close(gradients)
        else:
            graphs.note(gradients)
            graphs.renew(gradients, settings)
        return extras

    def _recorded(self, micro_batch: Any) -> _Recorded:
        """Run a micro-step whose count and weight stay on the device, as a replay computes them anew."""
        loss, extras = self._parts.loss(micro_batch)
        terms = self._parts.read(loss)
        data = [term for term in terms if term.kind != "once"]
        if len(data) != 1 or (data[0].kind == "sum" and len(terms) > 1):
            raise NotCapturable(_SEVERAL)
        if loss.dtype in LOW_PRECISION:
            raise NotCapturable(f"its loss is {loss.dtype}, which cannot hold a weight; compute it in float32")
        refuse_hidden(extras)
        weight = self._unit * data[0].count if data[0].kind == "mean" else self._unit
        self._parts.backward(loss, weight.to(loss.dtype).reshape(loss.shape))
        for term in terms:
            term.node = term.source = term.value = None  # what is kept must not keep the graph alive
        return _Recorded(terms, loss.detach(), extras)

    def _set_unit(self, window: Window, terms: Sequence[Term]) -> None:
        """Set what counts are multiplied with in this window, without waiting for the device."""
        (term,), ledger = [term for term in terms if term.kind != "once"], window.ledger
        if term.kind == "sum":
            self._unit.fill_(1.0)
        else:
            if ledger.provisional is None:  # a gradient scaler is tuned to means: weights stay below 1
                about = term.about or 1.0 if isinstance(term.count, Tensor) else max(term.count, 1.0)
                ledger.provisional = 1.0 if self._stepper.scaler is None else about * ledger.steps
            if isinstance(ledger.provisional, Tensor):
                self._unit.copy_(1.0 / ledger.provisional)
            else:
                self._unit.fill_(1.0 / ledger.provisional)
        if self._stepper.scaler is not None:
            self._unit.mul_(window.scale)


def _with_own_count(term: Term) -> Term:
    return replace(term, count=term.count.clone()) if isinstance(term.count, Tensor) else term

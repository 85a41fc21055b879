"""One window of captured micro-steps: replayed where a shape is known, launched where it is not, into the same sums."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.graph_replay import Graphs, Recipe
from bigbatch.loss.terms import Term
from bigbatch.window.stepper import Stepper
from bigbatch.window.tally import Tally


class Replaying:
    """The micro-batches of one window, and what is known of their loss by now."""

    def __init__(
        self, graphs: Graphs, recipe: Recipe, parameters: Sequence[Tensor], stepper: Stepper, number: int
    ) -> None:
        """Begin with nothing added; `number` micro-batches will come."""
        self._graphs, self._recipe, self._parameters, self._stepper = graphs, recipe, parameters, stepper
        self._number = number
        self._reached = [False] * len(parameters)
        self._counted, self._provisional = 0.0, 1.0
        self._on_device = False  # whether a count was a tensor: then the sum of all is there
        self._term: Term | None = None  # of the loss, as the first micro-batch has it

    def launch(self, micro_batch: Any) -> Any:
        """Run one micro-step as it is; returns its extras."""
        first = self._term is None
        extra, term, reached = self._graphs.launch(micro_batch, self._parameters, self._recipe, self._meet)
        self._added(term, reached, first=first)
        return extra

    def replay(self, micro_batch: Any) -> Any:
        """Run one micro-step as it was captured, or is now; returns its extras."""
        first = self._term is None
        with _uncached_autocast():
            captured = self._graphs.ready(micro_batch, self._parameters, self._recipe)
        self._meet(captured.term)
        extra = captured.replay(micro_batch)
        self._added(captured.term, captured.reached, first=first)
        return extra

    def tally(self, micro_batches: int) -> Tally:
        """Return what all of them came to."""
        term, totals = self._term, self._graphs.totals
        assert term is not None  # noqa: S101 - a batch has samples
        for p, used in zip(self._parameters, self._reached, strict=True):
            if not used:  # a gradient of zero is not none: the optimizer would let the parameter decay
                p.grad = None
        total = totals.count.clone() if self._on_device else self._counted
        loss = totals.loss.clone()  # the next window begins at zero
        return Tally(term.kind, micro_batches, self._provisional, total, loss, term.count)

    def _added(self, term: Term, reached: list[bool], *, first: bool) -> None:
        self._reached = [a or b for a, b in zip(self._reached, reached, strict=True)]
        if not isinstance(term.count, Tensor):
            self._counted += term.count
            return
        self._on_device = True
        if first:
            self._stepper.arrival.start(self._graphs.totals.count)

    def _meet(self, term: Term) -> None:
        """Set what counts are multiplied with, before the first backward, without waiting for the device."""
        if self._term is not None:
            if (term.name, term.factors) != (self._term.name, self._term.factors):
                raise NotCapturable("its loss changes with the shape of a micro-batch")
            return
        self._term, self._provisional = term, _provisional(term, self._number, self._stepper)
        unit = self._graphs.totals.unit
        unit.fill_(1.0 / self._provisional)
        if self._stepper.scaler is not None:
            unit.copy_(self._stepper.scaler.scale(unit))


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Autocast as it is, but without its cache: a copy of a weight made during a capture is in the graph's memory."""
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield


def _provisional(term: Term, number: int, stepper: Stepper) -> float:
    """With a gradient scaler, weights are kept below 1: it is tuned to means."""
    if term.kind == "sum" or stepper.scaler is None:
        return 1.0
    return (term.about or 1.0) * number if isinstance(term.count, Tensor) else max(term.count, 1.0) * number

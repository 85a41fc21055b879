"""Replay a micro-step instead of launching it: at small sizes the host takes longer to launch kernels than they run.

A micro-step is captured when its shape of micro-batch comes for the second time: forward, backward, and the adding
up of count and loss. Its inputs, the gradients and the running totals lie at fixed addresses.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bigbatch.batch.extras import detached
from bigbatch.batch.tree import PLAIN, leaves, mapped
from bigbatch.execute.graph_record import NotCapturable, Recorder
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.loss.terms import Term
from bigbatch.window.gradients import Gradients

_KEEP = 64  # graphs; each holds its own inputs, all share the memory of activations
_SHAPES = 256  # after so many, graphs should have served more micro-batches than not
_CAPTURES = 2 * _KEEP  # after so many, each should have been worth its while
_WORTH = 16  # replays of a graph; capturing takes about as long as launching so many


@dataclass
class Totals:
    """What the replays of a window add up to, on the device."""

    count: Tensor
    loss: Tensor  # times its count
    unit: Tensor  # what a count is multiplied with to make the weight of a backward

    @classmethod
    def on(cls, device: torch.device) -> "Totals":
        """Start at zero."""
        return cls(
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
            torch.ones((), dtype=torch.float64, device=device),
        )


@dataclass
class Captured:
    """A micro-step of one shape, ready to be replayed."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    extras: Any
    term: Term
    reached: list[bool] = field(default_factory=list)  # which parameters it adds a gradient to

    def replay(self, micro_batch: Any) -> Any:
        """Run it on another micro-batch of the same shape; returns its extras."""
        for path, leaf in leaves(micro_batch):
            if path in self.inputs:
                self.inputs[path].detach().copy_(leaf.detach(), non_blocking=True)
        self.graph.replay()
        return mapped(self.extras, lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


@dataclass(frozen=True)
class Recipe:
    """How a micro-step is made: its forward, the reading of its loss, its backward."""

    forward: Callable[[Any], tuple[Tensor, Any]]
    read: Callable[[Tensor], list[Term]]
    backward: Callable[[Tensor, Tensor], None]
    watching: Callable[[], AbstractContextManager[None]]  # refuses a capture that does what no replay can


class Graphs:
    """The captured micro-steps of one `BigStep`."""

    def __init__(self, device: torch.device) -> None:
        """Have none yet."""
        self._device = device
        self.loss_dtype = torch.float32
        self._seen: set[str] = set()  # shapes, of which some never come again
        self._launches = self._captures = 0
        self._replays = 0  # beside the first one of each capture
        self._recorder = Recorder(device)
        self._captured: dict[str, Captured] = {}
        self._gradients: list[Tensor | None] = []
        self._held: list[Tensor | None] = []
        self._state: object = None
        self.totals = Totals.on(device)

    def settle(self, state: object) -> None:
        """Begin a window in a `state`, what a capture depends on beside shapes; where it has changed, all is new."""
        if state != self._state:
            self.forget()
            self._state = state

    def renew(self, state: object) -> None:
        """Go on after a launch; where it has changed the `state`, graphs are captured anew, the window goes on."""
        if state != self._state:
            self._captured.clear()
            self._recorder.forget()
            self._state = state

    def open(self, gradients: Gradients, reached: Sequence[bool]) -> None:
        """Have gradients and totals of zero at the addresses that the graphs know.

        `reached` says which parameters get a gradient: the others have none, not one of zero, which an optimizer
        would step with.
        """
        if not self._gradients:
            self._gradients = [
                torch.zeros_like(p, dtype=gradients.dtype_of(p), requires_grad=False) if used else None
                for p, used in zip(gradients.parameters, reached, strict=True)
            ]
        gradients.preset(self._gradients)
        self._held = [p.grad for p in gradients.parameters]  # one of another type than its parameter is held by another
        torch._foreach_zero_([self.totals.count, self.totals.loss, *(g for g in self._gradients if g is not None)])

    def forget(self) -> None:
        """Throw all graphs away, and the memory they hold; what is captured next is launched before."""
        self._captured.clear()
        self._seen.clear()
        self._gradients, self._held = [], []
        self._recorder.forget()

    def is_new(self, micro_batch: Any) -> bool:
        """Whether no micro-batch of this shape has come before: capturing takes longer than launching some of them."""
        shape = shape_of(micro_batch)
        if shape in self._seen:
            return False
        self._seen.add(shape)
        if len(self._seen) > _SHAPES and self._captures + self._replays < self._launches:
            raise NotCapturable(f"its micro-batches have had {_SHAPES} shapes, and most came only once")
        return True

    def launch(
        self, micro_batch: Any, parameters: Sequence[Tensor], recipe: Recipe, meet: Callable[[Term], None]
    ) -> tuple[Any, Term, list[bool]]:
        """Run a micro-step as it is, adding to the same gradients and totals as the replays.

        `meet` is told of the loss's term before the backward. Returns extras, the term, and which parameters got a
        gradient.
        """
        self._launches += 1
        versions = self._versions()
        extras, term = self._micro_step(micro_batch, recipe, meet)
        return extras, term, self._reached_since(versions, parameters)

    def ready(self, micro_batch: Any, parameters: Sequence[Tensor], recipe: Recipe) -> Captured:
        """Return the captured micro-step for micro-batches of this shape, capturing it where there is none."""
        shape = shape_of(micro_batch)
        captured = self._captured.pop(shape, None)
        if captured is not None:
            self._replays += 1
        else:
            if self._captures >= _CAPTURES and self._replays < _WORTH * self._captures:
                msg = (
                    f"it is captured again and again, {self._captures} times by now, and replayed "
                    f"{self._replays / self._captures:.1f} times each; a number in the batch that changes should be a "
                    "tensor"
                )
                raise NotCapturable(msg)
            self._captures += 1
            versions = self._versions()
            with recipe.watching():
                captured = self._capture(micro_batch, recipe)
            # What is captured changes no value, but counts as a change in place: so it tells who gets a gradient.
            captured.reached = self._reached_since(versions, parameters)
            while len(self._captured) >= _KEEP:
                del self._captured[next(iter(self._captured))]
        self._captured[shape] = captured  # the one that was used last comes last
        return captured

    def _versions(self) -> list[int]:
        return [0 if g is None else g._version for g in self._held]  # noqa: SLF001 - torch's own counter

    def _reached_since(self, versions: list[int], parameters: Sequence[Tensor]) -> list[bool]:
        if any(p.grad is not g for p, g in zip(parameters, self._held, strict=True)):
            raise NotCapturable("another set of parameters gets gradients than before")
        return [a != b for a, b in zip(self._versions(), versions, strict=True)]

    def _capture(self, micro_batch: Any, recipe: Recipe) -> Captured:
        """Capture a micro-step; nothing is computed by this."""
        inputs = {
            path: leaf.detach().clone().requires_grad_(leaf.requires_grad)
            for path, leaf in leaves(micro_batch)
            if isinstance(leaf, Tensor)
        }
        fixed = mapped(micro_batch, inputs.get)
        graph, (extras, term) = self._recorder.record(lambda: self._micro_step(fixed, recipe))
        return Captured(graph, inputs, extras, term)

    def _micro_step(
        self, micro_batch: Any, recipe: Recipe, meet: Callable[[Term], None] = lambda _: None
    ) -> tuple[Any, Term]:
        loss, extras = recipe.forward(micro_batch)
        term = _only(recipe.read(loss))
        meet(term)
        self.loss_dtype = loss.dtype
        if loss.dtype in LOW_PRECISION:
            raise NotCapturable(f"its loss is {loss.dtype}, which cannot hold a weight; compute it in float32")
        given = term.count
        count = given.double() if isinstance(given, Tensor) else torch.full_like(self.totals.count, given)
        weight = count * self.totals.unit if term.kind == "mean" else self.totals.unit
        recipe.backward(loss, weight.to(loss.dtype).reshape(loss.shape))
        value = loss.detach().reshape(()).double()
        self.totals.count += count
        # The loss of a micro-batch without targets is NaN, and counts nothing.
        self.totals.loss += torch.where(count > 0, value * count, 0.0) if term.kind == "mean" else value
        term.node = term.source = term.value = None  # what is kept must not keep the graph alive
        return detached(extras), term


def _only(terms: list[Term]) -> Term:
    """Return the one term over data; a loss with more needs weights of its own for each."""
    data = [term for term in terms if term.kind != "once"]
    if len(data) != 1 or (data[0].kind == "sum" and len(terms) > 1):
        msg = (
            f"its loss has the terms {', '.join(term.name for term in terms)}, and only one mean or sum can be captured"
        )
        raise NotCapturable(msg)
    return data[0]


def shape_of(micro_batch: Any) -> str:
    """Name the shapes and kinds of a micro-batch's tensors; anything else by its value, which a graph bakes in."""
    return "; ".join(
        f"{path} {leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{path} {_value(leaf)}"
        for path, leaf in leaves(micro_batch)
    )


def _value(leaf: Any) -> str:
    content = getattr(leaf, "tobytes", None)  # numpy shows large arrays in part
    if content is not None:
        return f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')} {content()!r}"
    if isinstance(leaf, list | tuple):
        return f"{type(leaf).__name__} {[_value(each) for each in leaf]}"
    if leaf is not None and not isinstance(leaf, (*PLAIN, torch.dtype, torch.device)):
        raise NotCapturable(
            f"its batch holds a {type(leaf).__name__}, which a graph cannot look into; make it a tensor, a number or a "
            "dataclass of those"
        )
    return repr(leaf)

"""The runs of a proof: the big batch, the accumulated one, the micro-batches one by one."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bigbatch import arguments
from bigbatch.default_loss import own_loss
from bigbatch.loss.graph import edges
from bigbatch.state.scope import times_asked
from bigbatch.verifying.gradients import Gradients, taken
from bigbatch.verifying.places import Places
from bigbatch.verifying.samples import Samples
from bigbatch.verifying.subject import Standing, Subject
from bigbatch.verifying.turning_off import NOTHING, Off
from bigbatch.verifying.ways import Accumulated, OwnWay, Way
from bigbatch.wording import speaking_of


@dataclass(frozen=True)
class Whole:
    """What one forward and backward over all samples gave."""

    gradients: Gradients
    loss: float
    precise: bool = True  # nothing on the way was computed in less than the model's dtype


@dataclass(frozen=True)
class Parts:
    """What each micro-batch gave by itself: its loss, and its gradient in some places."""

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Tensor], ...]
    used: tuple[frozenset[str], ...]  # which parameters got a gradient


class Runs:
    """All that a proof runs, on the same samples and with the same random numbers each time."""

    def __init__(
        self,
        subject: Subject,
        loss_fn: Callable[[Any, Any], Any],
        samples: Samples,
        way: Way,
        on_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Run nothing yet."""
        self.subject, self.samples, self.way = subject, samples, way
        self.dtype: torch.dtype | None = None  # what to run in; None: the model's own
        self.autocast: torch.dtype | None = None  # in the model's own dtype: what a loop had in force
        self._loss_fn, self._on_run = loss_fn, on_run
        self.has_loss_fn = loss_fn is not own_loss
        self.asks = False  # whether the loss or the model has asked for all samples of the batch, by `across`

    @property
    def judged_in(self) -> torch.dtype:
        """The dtype that the model runs in now."""
        return self.dtype or self.subject.dtype

    def whole(
        self,
        off: Off = NOTHING,
        *,
        order: Sequence[int] | None = None,
        factor: float = 1.0,
        around: Callable[[Standing], AbstractContextManager[object]] = nullcontext,
    ) -> Whole:
        """Run the big batch: once forward, once backward; its loss times a `factor`, which is taken out again."""
        self._on_run("the big batch")
        with self.standing(off, self.samples.sizes) as standing, around(standing):
            asked = times_asked()
            loss = self.loss(standing.model, self.samples.whole(self.dtype, order))
            self.asks = self.asks or times_asked() != asked
            precise = self.judged_in != torch.float64 or _is_precise(loss)
            loss.backward(torch.full_like(loss, factor))
            return Whole(taken(standing.parameters, 1 / factor), float(loss.detach()), precise)

    def accumulated(self, off: Off = NOTHING, way: Way | None = None) -> Accumulated:
        """Run a window, by the way that is put to the proof or by another."""
        self._on_run("accumulated")
        way = way or self.way
        with self.standing(off) as standing:
            # BigStep looks at a loss by itself, and at first without a graph.
            loss = self._loss_fn if isinstance(way, OwnWay) else self.loss
            return way.run(standing, loss, self.samples, self.dtype)

    def parts(self, places: Places, off: Off = NOTHING) -> Parts:
        """Run the micro-batches one after the other, as a loop does, and keep each one's gradient apart."""
        self._on_run("each micro-batch")
        losses, gradients, used = [], [], []
        with self.standing(off) as standing:
            for place in range(len(self.samples.sizes)):
                loss = self.loss(standing.model, self.samples.micro_batch(place, self.dtype))
                loss.backward()
                losses.append(float(loss.detach()))
                gradients.append(places.of({name: p.grad for name, p in standing.parameters.items()}))
                used.append(frozenset(name for name, p in standing.parameters.items() if p.grad is not None))
                for p in standing.parameters.values():
                    p.grad = None
        return Parts(tuple(losses), tuple(gradients), tuple(used))

    def weighed(self, weights: Sequence[float], off: Off = NOTHING) -> Gradients:
        """Add the micro-batches up by given weights, in float64."""
        self._on_run("weighed anew")
        found: dict[str, Tensor | None] = {}
        with self.standing(off) as standing:
            for place, weight in enumerate(weights):
                self.loss(standing.model, self.samples.micro_batch(place, self.dtype)).backward()
                for name, gradient in taken(standing.parameters, weight).items():
                    before = found.get(name)
                    found[name] = gradient if before is None else before if gradient is None else before + gradient
                for p in standing.parameters.values():
                    p.grad = None
        return found

    def past_the_model(self, off: Off = NOTHING) -> Gradients:
        """Run the big batch with the model's outputs cut off: what is left is of parameters alone."""
        self._on_run("parameters alone")
        with self.standing(off, self.samples.sizes) as standing, _cut_off(standing.models):
            loss, _ = self._called(standing.model, self.samples.whole(self.dtype))
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                return dict.fromkeys(standing.parameters)
            loss.backward()
            return taken(standing.parameters)

    def is_swapped(self) -> bool:
        """Whether the user's function gives a loss when it is called as loss_fn(batch, model)."""
        with self.standing(NOTHING, self.samples.sizes) as standing:
            found, _ = self._called(self.samples.whole(self.dtype), standing.model)
            return isinstance(found, Tensor) and found.requires_grad

    def call(self, standing: Standing, batch: Any) -> Any:
        """Call the user's function for what it does on its way."""
        return self._called(standing.model, batch)[0]

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Call the user's function, and refuse what is no loss."""
        loss: Tensor
        loss, _ = self._called(model, batch)
        with speaking_of("verify"):
            arguments.loss(loss)
        return loss

    @contextmanager
    def standing(self, off: Off, sizes: Sequence[int] = ()) -> Iterator[Standing]:
        """Lend the model for a run with something turned off; `sizes` are its micro-batches where it runs whole."""
        device = self.samples.device.type
        autocast = self.dtype is None and self.autocast is not None
        context = torch.autocast(device, dtype=self.autocast) if autocast else nullcontext()
        with self.subject.fresh(self.dtype) as standing:
            if not sizes and not off.randomness:
                _draw_ahead(self.subject.devices)
            with off.around(standing, sizes), context:
                yield standing

    def _called(self, model: Any, batch: Any) -> tuple[Any, Any]:
        found = self._loss_fn(model, batch)
        return found if isinstance(found, tuple) and len(found) == 2 else (found, None)  # noqa: PLR2004 - and extras


def _draw_ahead(devices: frozenset[torch.device]) -> None:
    """Draw some numbers. By luck one layer's masks may be the same in any split, which proves nothing."""
    for device in {torch.device("cpu"), *devices}:
        torch.rand(1009, device=device)
    random.random()  # noqa: S311 - no secret
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.random(7)


@contextmanager
def _cut_off(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have no gradient come to a model by way of what it returns."""

    def detached(_module: nn.Module, _args: object, output: Any) -> Any:
        return _detached(output)

    handles = [model.register_forward_hook(detached) for model in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _detached(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_detached, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map(_detached, tree))
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _detached(value)
    return tree


def _is_precise(loss: Tensor) -> bool:
    """Whether a float64 model computed all of its loss in float64: many round to float32 on their way."""
    stack, seen = [loss.grad_fn], set[Node]()
    lower = (torch.float32, torch.bfloat16, torch.float16)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = node
        if any(each.dtype in lower for each in metadata._input_metadata):  # noqa: SLF001 - as reading.graph has it
            return False
        stack.extend(below for below, _ in edges(node))
    return True

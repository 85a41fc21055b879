"""Runs the big batch, the window and single micro-batches, always on the same samples and random numbers."""

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from bigbatch.batch.batch import Batch
from bigbatch.batch.tree import mapped
from bigbatch.default_loss import own_loss
from bigbatch.errors import LossError
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import times_asked
from bigbatch.verification.loop_recorder import LoopRecord, TrainWindow
from bigbatch.verification.model_copy import ModelCopy, ModelUnderTest
from bigbatch.verification.result import REMEDIES, Cause
from bigbatch.verification.switches import NOTHING, Off, turn_off
from bigbatch.verification.tolerance import Gradients, add, read_gradients

LossFunction = Callable[[Any, Any], Any]
Found = TypeVar("Found")
_COUNTS = "; count is mask.sum() under a mask, weight[labels].sum() under class weights"


@dataclass(frozen=True)
class Samples:
    """The big batch, and how many samples each micro-batch has."""

    batch: Batch
    sizes: tuple[int, ...]
    device: torch.device

    def take(self, indices: slice | Sequence[int], dtype: torch.dtype | None) -> Any:
        """Return some samples on the model's device."""
        return mapped(self.batch.take(indices), lambda _, leaf: cloned(leaf, dtype, self.device))

    def micro_batches(self, dtype: torch.dtype | None) -> list[Any]:
        """Return all micro-batches, as a loader would."""
        ends = zip(accumulate(self.sizes), self.sizes, strict=True)
        return [self.take(slice(end - size, end), dtype) for end, size in ends]


def cloned(leaf: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Copy a tensor, since a loss may write into its batch, and cast its numbers, not its labels."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device=device, dtype=dtype if leaf.is_floating_point() else None, copy=True)


@dataclass(frozen=True)
class Accumulated:
    """What one window gave, or one backward over all samples."""

    gradients: Gradients
    loss: float = math.nan
    sizes: tuple[int, ...] = ()  # of the micro-batches, where the strategy has cut them itself
    record: LoopRecord | None = None


@dataclass(frozen=True)
class Strategy:
    """A way to accumulate: by BigStep, weighted by samples for what BigStep refuses, or by a loop of the user's."""

    name: Literal["BigStep", "samples", "train_window"]
    size: int  # the rest: what BigStep and the loop run with
    options: Options
    big_step: Callable[..., Accumulated]
    train_window: TrainWindow | None = None
    clipping: bool = False  # whether a loop's own has an effect
    stepping: bool = True


class Runner:
    """All runs of a verification."""

    def __init__(
        self,
        model: ModelUnderTest,
        loss_fn: LossFunction,
        samples: Samples,
        strategy: Strategy,
        on_run: Callable[[str], None],
    ) -> None:
        """Run nothing yet."""
        self.model, self.samples, self.strategy = model, samples, strategy
        self.is_loop = strategy.name == "train_window"
        self.dtype: torch.dtype | None = None  # what to run in; None: the model's own
        self.autocast: torch.dtype | None = None  # of the big batch in the model's own dtype: what a loop uses
        self.uses_across = False
        self.has_loss_fn = loss_fn is not own_loss
        self.notes: list[str] = []
        self._loss_fn, self._on_run = loss_fn, on_run

    @property
    def judged_in(self) -> torch.dtype:
        """The dtype that the model runs in now."""
        return self.dtype or self.model.own.dtype

    def note(self, note: str) -> None:
        """Say it once."""
        if note not in self.notes:
            self.notes.append(note)

    def cause(self, kind: str, where: str, found: str, *, remedy: str = "", count: str = "", **of_text: Any) -> Cause:
        """Make a cause; its remedy is that of its kind, for BigStep or for a loop, unless one is passed."""
        advice = REMEDIES[kind][-1 if self.is_loop else 0]
        said = remedy or advice.format(count=count or "count", counts="" if count else _COUNTS, **of_text)
        return Cause(kind, where, f"{found[:1].upper()}{found[1:]}.", said)

    def attempt(self, experiment: Callable[[], Found], otherwise: Found, *, noted: bool = True) -> Found:
        """Return what an experiment finds; one may fail where training does not, as BatchNorm on one sample."""
        try:
            return experiment()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            let_go(error)
            if noted:
                self.notes.append(
                    f"An experiment failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                )
            return otherwise

    def whole(self, off: Off = NOTHING, *, order: Sequence[int] | None = None, factor: float = 1.0) -> Accumulated:
        """Run the big batch, its loss times a `factor`, which is taken out again."""
        self._on_run("the big batch")
        with self.copy(off, self.samples.sizes) as model:
            asked = times_asked()
            every = slice(0, self.samples.batch.size) if order is None else order
            loss = self._loss(model.model, self.samples.take(every, self.dtype))
            self.uses_across = self.uses_across or times_asked() != asked
            loss.backward(torch.full_like(loss, factor))
            return Accumulated(read_gradients(model.parameters, 1 / factor), float(loss.detach()))

    def accumulated(self, off: Off = NOTHING, strategy: Strategy | None = None) -> Accumulated:
        """Run a window, by the strategy that is verified or by another."""
        strategy = strategy or self.strategy
        self._on_run("accumulated")
        with self.copy(off) as model:
            if strategy.name == "BigStep":  # which checks its loss itself
                return strategy.big_step(strategy, model, self._loss_fn, self.samples, self.dtype)
            micro_batches = self.samples.micro_batches(self.dtype)
            if strategy.name == "train_window" and strategy.train_window is not None:
                undo = {"undo_clipping": not strategy.clipping, "undo_steps": not strategy.stepping}
                found = LoopRecord(model, self.model.parameter_ids, **undo)
                found.run(strategy.train_window, micro_batches)
                gradients = found.gradients if strategy.stepping else found.over_all_steps
                return Accumulated(gradients, found.loss, record=found)
            total = 0.0
            for batch, size in zip(micro_batches, self.samples.sizes, strict=True):
                loss, weight = self._loss(model.model, batch), size / self.samples.batch.size
                loss.backward(torch.full_like(loss, weight))
                total += weight * float(loss.detach())
            return Accumulated(read_gradients(model.parameters), total)

    def per_micro_batch(self, off: Off = NOTHING) -> Iterator[tuple[float, Gradients]]:
        """Run the micro-batches one after the other, as a loop does; return each one's own loss and gradient."""
        self._on_run("each micro-batch")
        with self.copy(off) as model:
            for batch in self.samples.micro_batches(self.dtype):
                loss = self._loss(model.model, batch)
                loss.backward()
                yield float(loss.detach()), read_gradients(model.parameters)
                for p in model.parameters.values():
                    p.grad = None

    def weighted(self, weights: Sequence[float], off: Off = NOTHING) -> Gradients:
        """Add the micro-batches up by given weights, in float64."""
        every = zip(weights, self.per_micro_batch(off), strict=True)
        return add({name: weight * g for name, g in gradients.items()} for weight, (_, gradients) in every)

    def forward(self, model: ModelCopy, start: int, end: int) -> None:
        """Call the user's function on some samples, for what it does on its way."""
        self._loss_fn(model.model, self.samples.take(slice(start, end), self.dtype))

    @contextmanager
    def copy(self, off: Off = NOTHING, sizes: Sequence[int] = ()) -> Iterator[ModelCopy]:
        """Return a copy of the model for a run; `sizes` are its micro-batches where it runs whole."""
        lowered, device = self.autocast if self.dtype is None else None, self.samples.device.type
        with self.model.fresh(self.dtype) as model:
            switched = turn_off(off, model, sizes)
            if not sizes:
                _draw_ahead(self.model.devices)
            with switched, nullcontext() if lowered is None else torch.autocast(device, dtype=lowered):
                yield model

    def _loss(self, model: Any, batch: Any) -> Tensor:
        """Call the user's function, and raise for what is no loss."""
        loss = self._loss_fn(model, batch)
        loss = loss[0] if isinstance(loss, tuple) and len(loss) == 2 else loss  # noqa: PLR2004 - and extras
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError("loss_fn must return one number, the loss of the batch.", found=shape)
        if not loss.requires_grad:
            fix = "it without .item(), .detach() and torch.no_grad()"
            raise LossError("the loss has no graph, so no gradient can come from it.", fix=fix)
        return loss


def loader_sizes(total: int, size: int) -> tuple[int, ...]:
    """Return the sizes of a loader's micro-batches: full ones and a short last one."""
    return (size,) * (total // size) + ((total % size,) if total % size else ())


def uneven_size(total: int, size: int, *, balanced: bool = False) -> int | None:
    """Return the nearest micro-batch size that does not divide the batch; `balanced`: as BigStep evens them out."""
    others = [each for each in range(2, total) if total % (-(-total // each) if balanced else each)]
    return min(others, key=lambda each: (abs(each - size), each), default=None)


def _draw_ahead(devices: frozenset[torch.device]) -> None:
    """Draw some numbers: by luck one layer's masks may be the same in any split."""
    for device in {torch.device("cpu"), *devices}:
        torch.rand(1009, device=device)
    random.random()  # noqa: S311 - no secret
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random(7)

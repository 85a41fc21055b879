"""Runs the big batch, the window and single micro-batches, always on the same samples and random numbers."""

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.split import balanced
from bigbatch.batch.tree import mapped
from bigbatch.big_step import BigStep
from bigbatch.default_loss import own_loss
from bigbatch.errors import BigBatchError
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.verification.model_copy import (
    Gradients,
    LoopRecord,
    ModelCopy,
    TrainWindow,
    add,
    first_line,
    read_gradients,
)
from bigbatch.verification.suspects import NOTHING, Off, turn_off

LossFunction = Callable[[Any, Any], Any]
Found = TypeVar("Found")


class Accumulated(NamedTuple):
    """What one window gave, or one backward over all samples."""

    gradients: Gradients
    loss: float = math.nan
    sizes: tuple[int, ...] = ()  # of the micro-batches, where BigStep has cut them
    record: LoopRecord | None = None


class Runner:
    """All runs of a verification, and how a window is accumulated in them: by BigStep, or by a loop of the user's."""

    def __init__(
        self,
        model: ModelCopy,
        loss_fn: LossFunction | None,
        batch: Batch,
        size: int,
        *,
        options: Options,
        train_window: TrainWindow | None,
    ) -> None:
        """Run nothing yet; `size` is the most samples of a micro-batch."""
        self.model, self.batch, self.size = model, batch, size
        self.options, self.train_window = options, train_window
        every, rest = divmod(batch.size, size)  # a loader has full ones and a short last one
        self.sizes = [size] * every + [rest] * bool(rest) if train_window else balanced(batch.size, size)
        self.by_samples = False  # weighted by samples: what BigStep refuses, checked or not
        self.clips = False  # whether a loop's own clipping has an effect
        self.adds_steps = False  # whether the gradients of all of a loop's steps count, instead of the first one's
        self.off = NOTHING
        self.dtype: torch.dtype | None = None  # what to run in; None: the model's own
        self.autocast: torch.dtype | None = None  # of the big batch in the model's own dtype: what a loop uses
        self.refused: BigBatchError | None = None  # what BigStep raises
        self.notes: list[str] = []
        self.devices = devices_of(model.models)
        self.has_loss_fn, self.loss_fn = loss_fn is not None, loss_fn or own_loss

    @property
    def judged_in(self) -> torch.dtype:
        """The dtype that the model runs in now."""
        return self.dtype or self.model.dtype

    def attempt(self, experiment: Callable[[], Found], otherwise: Found) -> Found:
        """Return what an experiment finds; one may fail where training does not, as BatchNorm on one sample."""
        try:
            return experiment()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            let_go(error)
            self.notes.append(f"An experiment failed with {type(error).__name__}: {first_line(error)}")
            return otherwise

    def take(self, indices: slice | Sequence[int]) -> Any:
        """Copy some samples to the model's device, since a loss may write into its batch."""
        return self._cloned(self.batch.take(indices))

    def _cloned(self, tree: Any) -> Any:
        """Copy tensors and cast their numbers, not their labels."""

        def cloned(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dtype = self.dtype if leaf.is_floating_point() else None
            return leaf.detach().to(device=self.model.device, dtype=dtype, copy=True)

        return mapped(tree, cloned)

    def micro_batches(self) -> list[Any]:
        """Return all micro-batches, as a loader would."""
        ends = zip(accumulate(self.sizes), self.sizes, strict=True)
        return [self.take(slice(end - size, end)) for end, size in ends]

    def whole(self, also: Off = NOTHING, *, order: Sequence[int] | None = None, factor: float = 1.0) -> Accumulated:
        """Run the big batch, its loss times a `factor`, which is taken out again."""
        with self.copy(also, ahead=False) as model:
            loss = self._loss(model.model, self.take(slice(0, self.batch.size) if order is None else order))
            loss.backward(torch.full_like(loss, factor))
            return Accumulated(read_gradients(model.parameters, 1 / factor), float(loss.detach()))

    def accumulated(self) -> Accumulated:
        """Run a window."""
        if self.by_samples:
            return Accumulated(self.weighted([size / self.batch.size for size in self.sizes]))
        if self.train_window is None:
            return self.by_big_step(self.options)
        with self.copy() as model:
            record = LoopRecord(model, self.model, undo_clipping=not self.clips)
            record.run(self.train_window, self.micro_batches())
            gradients = add([record.left, *record.stepped]) if self.adds_steps else record.gradients
            return Accumulated(gradients, record.loss, record=record)

    def by_big_step(self, options: Options) -> Accumulated:
        """Have a BigStep make the gradient; what it raises comes out."""
        sizes: list[int] = []

        def loss_fn(network: Any, micro_batch: Any) -> Any:
            if options.lengths:
                sizes.append(Batch.of(micro_batch, shared=self.batch.shared).size)
            return self.loss_fn(network, micro_batch)

        collate = options.collate
        if collate is not None:
            options = replace(options, collate=lambda some: self._cloned(collate(some)))
        batch = self.batch.whole if collate else self.take(slice(0, self.batch.size))
        with self.copy() as model, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what BigStep cannot see is compared here
            optimizer = torch.optim.SGD(model.parameters.values(), lr=0.0)
            step = BigStep(model.model, optimizer, loss_fn, micro_batch_size=self.size, options=options)
            update = step.gradients(batch)
            loss = float(update.loss) if update.loss_is_exact else math.nan
            return Accumulated(read_gradients(model.parameters), loss, tuple(sizes[-update.micro_batches :]))

    def per_micro_batch(self, also: Off = NOTHING) -> Iterator[Gradients]:
        """Run the micro-batches one after the other, as a loop does; return each one's own gradient."""
        with self.copy(also) as model:
            for batch in self.micro_batches():
                self._loss(model.model, batch).backward()
                yield read_gradients(model.parameters)
                for p in model.parameters.values():
                    p.grad = None

    def weighted(self, weights: Sequence[float], also: Off = NOTHING) -> Gradients:
        """Add the micro-batches up by given weights, in float64."""
        every = zip(weights, self.per_micro_batch(also), strict=True)
        return add({name: weight * g for name, g in gradients.items()} for weight, gradients in every)

    @contextmanager
    def copy(self, also: Off = NOTHING, *, ahead: bool = True) -> Iterator[ModelCopy]:
        """Return a copy of the model for a run, with what is off turned off, and this, too.

        `ahead`: other random numbers are drawn than for the big batch.
        """
        lowered = self.autocast if self.dtype is None else None
        randomness = Randomness(self.devices)
        try:
            model = self.model.twin(self.dtype)
            switched = turn_off(self.off | also, model)
            if ahead:
                _draw_ahead(self.devices)
            with switched, nullcontext() if lowered is None else torch.autocast(self.model.device.type, dtype=lowered):
                yield model
        finally:
            randomness.restore()

    def _loss(self, model: Any, batch: Any) -> Tensor:
        found: Any = self.loss_fn(model, batch)
        loss: Tensor = found[0] if isinstance(found, tuple) and len(found) == 2 else found  # noqa: PLR2004 - and extras
        arguments.loss(loss)
        return loss


def _draw_ahead(devices: frozenset[torch.device]) -> None:
    """Draw some numbers: by luck one layer's masks may be the same in any split."""
    for device in {torch.device("cpu"), *devices}:
        torch.rand(1009, device=device)
    random.random()  # noqa: S311 - no secret
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random(7)

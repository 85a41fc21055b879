"""A model in training by an accumulator, beside the big-batch twin that it must equal."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch import Accumulator, Update
from tests.support.losses import READABLE
from tests.support.reference import (
    FLOOR,
    TOLERANCE,
    OptimizerFactory,
    big_batches,
    distance,
    sgd,
    state,
    trained,
    weights,
)
from tests.support.samples import Batch, Loss

# Targets ignored and weighed: no two micro-batches count alike, so every wrong weight shows.
MASKED = next(case for case in READABLE if case.name == "cross_entropy-functional-2-D-ignored-weights-mean")
PLAIN = next(case for case in READABLE if case.name == "mse-mean")
SUMMED = next(case for case in READABLE if case.name == "sum")
SIZES = (3, 1, 4, 2, 5, 1, 2)


def micro_batches(sizes: Sequence[int] = SIZES, case: Loss = MASKED, seed: int = 0) -> list[Batch]:
    """Micro-batches of uneven size."""
    return case.micro_batches(sizes, seed)


class Training:
    """A case's model, an optimizer and an accumulator."""

    def __init__(
        self, steps: int, *, case: Loss = MASKED, optimizer: OptimizerFactory = sgd, model: Any = None, **options: Any
    ) -> None:
        self.case, self._factory, self._clip_norm = case, optimizer, options.get("clip_norm")
        self.scaler: torch.amp.GradScaler | None = options.get("scaler")
        self.model: nn.Module = case.model() if model is None else model
        self.optimizer = optimizer(trained(self.model))
        self.accumulator = Accumulator(self.model, self.optimizer, steps=steps, **options)

    def backward(self, batch: Batch) -> Update | None:
        """One micro-batch."""
        return self.accumulator.backward(self.case.loss(self.model, batch))

    def train(self, loader: Iterable[Batch]) -> list[Update]:
        """One epoch, as a user writes it; returns the updates."""
        made = [self.backward(batch) for batch in self.accumulator.over(loader)]
        return [update for update in made if update is not None]

    @property
    def weights(self) -> list[Tensor]:
        """The parameters as they are now."""
        return weights(self.model)

    def assert_big_batches(self, *windows: Sequence[Batch], tolerance: float = TOLERANCE) -> None:
        """Weights and optimizer state are those after one real big batch per window."""
        batches, steps = [batch for window in windows for batch in window], [len(window) for window in windows]
        true = big_batches(self.case, batches, steps, optimizer=self._factory, clip_norm=self._clip_norm)
        assert distance(self.weights, true.weights) <= tolerance, "the weights differ"
        assert distance(state(self.optimizer), true.state, FLOOR) <= tolerance, "the optimizer's state differs"

    def assert_untouched(self) -> None:
        """No step was made, and no gradient or state is left."""
        assert all(torch.equal(a, b) for a, b in zip(self.weights, weights(self.case.model()), strict=True))
        assert not state(self.optimizer)
        assert all(p.grad is None for p in trained(self.model))

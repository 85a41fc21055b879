"""What one big batch gives, and what cut batches give beside it: gradient, outputs, running statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bigbatch import BigStep, Options

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]  # the loss, and outputs with one row per sample
Activations = Literal["auto", "keep", "recompute", "offload"]
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Result:
    """What one pass over a batch left behind, in float64 and flat."""

    loss: float
    gradient: Tensor
    outputs: Tensor
    statistics: Tensor  # running means and variances
    counters: tuple[int, ...]  # batches tracked, layer by layer


@dataclass(frozen=True)
class Distance:
    """How far one result is from another, relative to that; None where there is nothing to compare."""

    gradient: float
    outputs: float | None
    statistics: float | None


@dataclass(frozen=True, eq=False)
class Case:
    """A model, a batch and a loss, on their device; `model()` returns the same weights every time, in float32."""

    model: Callable[[], nn.Module]
    batch: Batch
    loss: Loss

    @cached_property
    def truth(self) -> Result:
        """One big batch in float64."""
        return self.full(torch.float64)

    def full(self, dtype: torch.dtype) -> Result:
        """One forward and backward over everything."""
        return self.accumulated(len(next(iter(self.batch.values()))), dtype)

    def accumulated(self, micro_batch: int, dtype: torch.dtype) -> Result:
        """Accumulate plainly: each micro-batch's loss, weighed by its samples; right where samples are independent."""
        model, batch = self.model().to(dtype), _cast(self.batch, dtype)
        pieces = _cut(batch, micro_batch)
        samples = len(next(iter(batch.values())))
        total, outputs = 0.0, []
        for piece in pieces:
            loss, found = self.loss(model, piece)
            share = len(next(iter(piece.values()))) / samples
            (loss * share).backward()
            total += float(loss.detach()) * share
            outputs.append(found)
        return _result(model, total, outputs)

    def ours(self, micro_batch: int, dtype: torch.dtype, activations: Activations) -> Result:
        """Have BigStep make the gradient, and read it before the step."""
        model, batch = self.model().to(dtype), _cast(self.batch, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options = Options(activations=activations)
        step = BigStep(model, optimizer, self.loss, micro_batch_size=micro_batch, options=options)
        found: list[Result] = []
        step.before_step(lambda: found.append(_result(model, 0.0, ())))
        update = step(batch)
        return replace(found[0], loss=float(update.loss), outputs=_flat([update.extras]))


def distance(found: Result, truth: Result) -> Distance:
    """Compare; what is not finite or has another shape is infinitely far."""
    statistics: float | None = None
    if truth.statistics.numel():
        statistics = _apart(found.statistics, truth.statistics)
        if found.counters != truth.counters:
            statistics = float("inf")
    outputs = _apart(found.outputs, truth.outputs) if truth.outputs.numel() else None
    return Distance(_apart(found.gradient, truth.gradient), outputs, statistics)


def _apart(found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape:
        return float("inf")
    apart = float((found - truth).norm() / truth.norm())
    return apart if apart == apart else float("inf")  # noqa: PLR0124 - NaN


def _result(model: nn.Module, loss: float, outputs: Sequence[Tensor]) -> Result:
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    buffers = dict(model.named_buffers())
    statistics = [buffer for name, buffer in buffers.items() if name.endswith(STATISTICS)]
    counters = [int(buffer) for name, buffer in buffers.items() if name.endswith("num_batches_tracked")]
    return Result(loss, _flat(gradients), _flat(outputs), _flat(statistics), tuple(counters))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors, one after the other, into one of float64."""
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def _cut(batch: Batch, size: int) -> list[Batch]:
    """Cut as BigStep does: into as few as that takes, of almost the same size."""
    samples = len(next(iter(batch.values())))
    number = -(-samples // size)
    parts = {name: values.tensor_split(number) for name, values in batch.items()}
    return [{name: values[place] for name, values in parts.items()} for place in range(number)]


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in batch.items()}

"""The definition of exact: the same training run over real big batches, in plain torch, to compare with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from bigbatch import Accumulator
from bigbatch.update import Update
from tests.support.samples import Batch, Loss

TOLERANCE = 1e-12  # of the norm, in float64
FLOOR = 1e-2  # below this norm a gradient may be the rounding of larger numbers that cancel
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LossFunction = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Run:
    """What a training run left behind, and what it said on the way."""

    weights: list[Tensor]
    steps: list[list[Tensor]]
    state: list[Tensor]
    losses: list[float | None]  # None: not told
    norms: list[float | None]
    counts: list[float | None]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD: a step is the gradient, so comparing steps compares gradients."""
    return torch.optim.SGD(parameters, lr=0.5)


def gentle(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that no chain of operations makes diverge: there rounding would grow from update to update."""
    return torch.optim.SGD(parameters, lr=1e-3)


def windows(batches: Sequence[Batch], steps: int | Sequence[int]) -> list[Sequence[Batch]]:
    """The micro-batches behind each update: as many for each, the last window perhaps short; or as listed."""
    if isinstance(steps, int):
        return [batches[start : start + steps] for start in range(0, len(batches), steps)]
    assert sum(steps) == len(batches)
    return [batches[end - length : end] for length, end in zip(steps, accumulate(steps), strict=True) if length]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters an optimizer gets."""
    return [p for p in model.parameters() if p.requires_grad]


def weights(model: nn.Module) -> list[Tensor]:
    """The parameters as they are now."""
    return [p.detach().clone() for p in trained(model)]


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every number an optimizer keeps, in the order of its parameters."""
    kept = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    values = [each[key] for each in kept for key in sorted(each)]
    return [torch.as_tensor(value, dtype=torch.float64) for value in values if value is not None]


def big_batches(
    case: Loss, batches: Sequence[Batch], steps: int | Sequence[int], *,
    model: nn.Module | None = None, loss: LossFunction | None = None,
    optimizer: OptimizerFactory = sgd, clip_norm: float | None = None, epochs: int = 1,
) -> Run:  # fmt: skip
    """One forward and backward over each window's samples joined."""
    model, loss = model or case.model(), loss or case.loss
    updater, run, before = optimizer(trained(model)), Run([], [], [], [], [], []), weights(model)
    for window in windows(batches, steps) * epochs:
        batch = case.join(window)
        if case.count and not case.count(batch):
            continue  # nothing to average: no update
        updater.zero_grad()
        value = loss(model, batch)
        value.backward()
        norm = clip_grad_norm_(trained(model), float("inf") if clip_norm is None else clip_norm)
        updater.step()
        after = weights(model)
        run.steps.append([a - b for a, b in zip(after, before, strict=True)])
        before = after
        run.losses.append(float(value.detach()))
        run.norms.append(float(norm))
        run.counts.append(float(case.count(batch)) if case.count else None)
    run.weights.extend(before)
    run.state.extend(state(updater))
    return run


def accumulated(
    case: Loss, batches: Sequence[Batch], steps: int, *, model: nn.Module | None = None,
    loss: LossFunction | None = None, optimizer: OptimizerFactory = sgd, epochs: int = 1, **settings: Any,
) -> Run:  # fmt: skip
    """The same updates, micro-batch by micro-batch; `settings` are the Accumulator's."""
    model, loss = model or case.model(), loss or case.loss
    updater, run, before = optimizer(trained(model)), Run([], [], [], [], [], []), weights(model)
    accumulator = Accumulator(model, updater, steps=steps, **settings)
    for _ in range(epochs):
        for batch in accumulator.over(batches):
            update = accumulator.backward(loss(model, batch))
            if update is not None and not update.skipped:
                before = taken_down(run, update, before, model, case)
    run.weights.extend(before)
    run.state.extend(state(updater))
    return run


def taken_down(run: Run, update: Update, before: list[Tensor], model: nn.Module, case: Loss) -> list[Tensor]:
    """Take down what an update did and said; returns the weights after it."""
    after = weights(model)
    run.steps.append([a - b for a, b in zip(after, before, strict=True)])
    run.losses.append(told(update, always=case.told and case.counts is None))
    run.norms.append(None if update.grad_norm is None else float(update.grad_norm))
    run.counts.append(one(update.count) if case.count else None)
    return after


def told(update: Update, *, always: bool) -> float | None:
    """The big batch's loss, or None where it may be unknown and says so."""
    return float(update.loss) if always or update.loss_is_exact else None


def one(count: object) -> float:
    """The count of a loss that has but one."""
    assert isinstance(count, float | int | Tensor), f"several counts: {count}"
    return float(count)


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor], floor: float = 1e-30) -> float:
    """How far apart two lists of tensors are, relative to the norm of the second, or to `floor` if that is larger."""
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    if not theirs:
        return 0.0
    a = torch.cat([each.double().flatten() for each in ours])
    b = torch.cat([each.double().flatten() for each in theirs])
    return float((a - b).norm() / b.norm().clamp_min(floor))


def close(ours: float | None, theirs: float | None, tolerance: float) -> bool:
    """Numbers equal to a relative tolerance, or to that of 1 where they cancel; what was not told is not compared."""
    if ours is None or theirs is None or ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return True
    return abs(ours - theirs) <= tolerance * max(abs(theirs), 1.0)


def assert_equal(ours: Run, theirs: Run, tolerance: float = TOLERANCE) -> None:
    """The accumulated run is the big-batch run: steps, weights, optimizer state, and what was told.

    A step longer than 1 makes what follows as many times more sensitive to rounding, and a loss without a lower bound
    soon leaves no numbers to compare: so tolerance grows with such steps, and where it is a million times larger,
    comparing ends. The first update is always held to the tolerance itself.
    """
    assert len(ours.steps) == len(theirs.steps)
    growth = 1.0
    for index, (mine, true) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        size = float(torch.cat([each.double().flatten() for each in true]).norm())
        if not math.isfinite(size):
            return
        slack = tolerance * growth
        assert distance(mine, true, FLOOR) <= slack * 10 ** min(index, 1), f"update {index}: the step differs"
        for name in ("losses", "norms", "counts"):
            told, known = getattr(ours, name)[index], getattr(theirs, name)[index]
            assert close(told, known, slack), f"update {index}: {name} {told}, the big batch's {known}"
        growth *= max(1.0, size)
        if growth > 1e6:
            return
    assert distance(ours.weights, theirs.weights) <= tolerance * growth, "the final weights differ"
    assert distance(ours.state, theirs.state, FLOOR) <= tolerance * growth, "the optimizer's state differs"

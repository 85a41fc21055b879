"""Train a user's `Setup` with an `Accumulator`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bigbatch.accumulator import Accumulator
from bigbatch.errors import LossError
from bigbatch.setup import Setup
from bigbatch.update import Update


@dataclass(frozen=True)
class Epoch:
    """One pass over the data."""

    updates: int
    skipped: int
    """Windows that made no update, as when none of their targets counted."""
    loss: float | None
    """The mean of the updates' losses, each at the weights before its update, where they are known."""
    metrics: dict[str, float]
    seconds: float
    """Of training alone, without `evaluate`."""


@dataclass(frozen=True)
class Training:
    """A finished training."""

    batch_size: int
    micro_batch_size: int
    steps: int
    clip_norm: float | None
    epochs: tuple[Epoch, ...]
    peak_bytes: int | None
    """Peak of CUDA memory, where the model is there."""


def train_setup(setup: Setup, *, on_update: Callable[[int], None] = lambda epoch: None) -> Training:  # noqa: ARG005
    """Train for `setup.epochs`; `on_update(epoch)` is told of every update, epochs counted from 1."""
    device = next((parameter.device for parameter in setup.model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    accumulator = Accumulator(
        setup.model,
        setup.optimizer,
        steps=setup.steps,
        clip_norm=setup.clip_norm,
        scheduler=setup.scheduler,
    )
    numbers = range(1, setup.epochs + 1)
    epochs = tuple(_one_epoch(setup, accumulator, partial(on_update, epoch)) for epoch in numbers)
    return Training(
        batch_size=setup.batch_size,
        micro_batch_size=setup.micro_batch_size or setup.batch_size,
        steps=setup.steps,
        clip_norm=setup.clip_norm,
        epochs=epochs,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def expected_updates(setup: Setup) -> int | None:
    """How many updates there will be, where the data has a length."""
    try:
        micro_batches = len(setup.micro_batches())
    except TypeError:
        return None
    return setup.epochs * -(-micro_batches // setup.steps)


def _one_epoch(setup: Setup, accumulator: Accumulator, on_update: Callable[[], None]) -> Epoch:
    """One pass: train, then evaluate."""
    updates: list[Update] = []
    setup.model.train()
    started = time.perf_counter()
    for batch in accumulator.over(setup.micro_batches()):
        update = accumulator.backward(setup.loss(batch))
        if update is not None:
            updates.append(update)
            on_update()
    # Read once, here: a loss is a tensor on the device, and reading it waits for the device.
    done = [update for update in updates if not update.skipped]
    loss = _mean_loss(done)
    seconds = time.perf_counter() - started
    return Epoch(len(done), len(updates) - len(done), loss, _evaluated(setup), seconds)


def _mean_loss(updates: list[Update]) -> float | None:
    """Over updates, where there are any and their losses are known."""
    try:
        losses = [update.loss.detach() for update in updates]
    except LossError:  # several counts, whose terms' values no graph keeps
        return None
    return torch.stack(losses).double().mean().item() if losses else None


def _evaluated(setup: Setup) -> dict[str, float]:
    """The user's own numbers, in eval mode and without gradients."""
    if setup.evaluate is None:
        return {}
    setup.model.eval()
    with torch.no_grad():
        metrics: Any = setup.evaluate(setup.model)
    setup.model.train()
    return {str(name): float(value) for name, value in metrics.items()}

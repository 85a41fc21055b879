"""Train a user's `Setup` in one process, by a `BigStep`."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import default_collate

from bigbatch.big_step import BigStep
from bigbatch.errors import ConfigurationError
from bigbatch.lockstep.threads import current
from bigbatch.options import Options
from bigbatch.setup import Setup, calling
from bigbatch.update import Update

_BATCH = "making a batch of data"


@dataclass(frozen=True)
class Epoch:
    """One pass over the data."""

    updates: int
    skipped: int  # batches that made no update, as when none of their targets counted
    clipped: int | None  # updates whose gradient was larger than `clip_norm`; None where nothing is clipped
    loss: float | None  # the mean of the updates' losses, each before its update; None where they are not known
    metrics: dict[str, float]
    seconds: float  # of training alone, without `evaluate`


@dataclass(frozen=True)
class Training:
    """A training, finished or as far as it has come."""

    batch_size: int
    micro_batch_size: int
    steps: int
    clip_norm: float | None
    epochs: tuple[Epoch, ...]
    peak_bytes: int | None  # of CUDA memory, where the model is there
    lock_step: bool = False  # whether samples are coupled, and micro-batches ran in lock-step


def train_setup(
    setup: Setup,
    *,
    on_update: Callable[[int], None] = lambda epoch: None,  # noqa: ARG005
    on_epoch: Callable[[Training], None] = lambda training: None,  # noqa: ARG005
) -> Training:
    """Train for `setup.epochs`; what the user's own code raises comes out as a `UserCodeError` that names the call.

    Args:
        setup: what to train.
        on_update: called with the number of the epoch, from 1, after each update.
        on_epoch: called with the training so far after each epoch.
    """
    device = next((parameter.device for parameter in setup.model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if not setup.model.training:  # as from_pretrained() returns it; else layers frozen by .eval() stay so
        setup.model.train()
    workers: set[bool] = set()  # whether micro-batches ran in lock-step
    step = _big_step(setup, workers)
    training = Training(setup.batch_size, max(setup.sizes), setup.steps, setup.clip_norm, epochs=(), peak_bytes=None)
    for number in range(1, setup.epochs + 1):
        updates: list[Update] = []
        started = time.perf_counter()
        batches = iter(setup.batches(collated=False))
        while (batch := _next(batches)) is not None:
            with calling("the loss's backward, or the update after it,"):
                updates.append(step(batch))
            on_update(number)
        epoch = _summarize(setup, number, updates, started)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        training = replace(training, epochs=(*training.epochs, epoch), peak_bytes=peak, lock_step=any(workers))
        on_epoch(training)
    return training


def expected_updates(setup: Setup) -> int | None:
    """Return how many updates there will be, where the data has a length."""
    try:
        return setup.epochs * len(setup.batches())
    except TypeError:
        return None


def _big_step(setup: Setup, workers: set[bool]) -> BigStep:
    """Return what makes the updates, from lists of samples."""

    def loss_fn(_: Any, batch: Any) -> Any:
        workers.add(current() is not None)
        with calling("loss_fn" if setup.loss_fn else "model(**batch).loss"):
            return setup.loss(batch)

    def collate(samples: list[Any]) -> Any:
        with calling(_BATCH):
            return (setup.collate or default_collate)(samples)

    return BigStep(
        setup.model,
        setup.optimizer,
        loss_fn,
        micro_batch_size=setup.micro_batch_size or setup.batch_size,
        clip_norm=setup.clip_norm,
        scheduler=setup.scheduler,
        scaler=setup.scaler,
        options=Options(
            collate=collate,
            batch_norm=setup.batch_norm,
            gradient_dtype=setup.gradient_dtype,
            skip_nonfinite=setup.skip_nonfinite,
        ),
    )


def _next(batches: Iterator[Any]) -> Any:
    with calling(_BATCH):
        return next(batches, None)


def _summarize(setup: Setup, number: int, updates: list[Update], started: float) -> Epoch:
    """Read an epoch's numbers from the device, once, and evaluate."""
    if not updates:
        raise ConfigurationError(
            f"The data gave no sample in epoch {number}. An IterableDataset must begin anew in each __iter__().",
            found=type(setup.data).__name__,
        )
    done = [update for update in updates if not update.skipped]
    is_known = done and all(update.loss_is_exact for update in done)
    loss = torch.stack([update.loss.detach() for update in done]).double().mean().item() if is_known else None
    norms = [] if setup.clip_norm is None else [update.grad_norm for update in done if update.grad_norm is not None]
    clipped = None if setup.clip_norm is None else sum(int(norm > setup.clip_norm) for norm in norms)
    seconds = time.perf_counter() - started
    return Epoch(len(done), len(updates) - len(done), clipped, loss, _evaluate(setup), seconds)


def _evaluate(setup: Setup) -> dict[str, float]:
    """Return the user's own numbers, in eval mode and without gradients."""
    if setup.evaluate is None:
        return {}
    modes = [(module, module.training) for module in setup.model.modules()]
    setup.model.eval()
    with torch.no_grad(), calling("evaluate"):
        metrics: Any = setup.evaluate(setup.model)
    for module, mode in modes:
        module.training = mode
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        found = repr(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
        fix = 'return {"accuracy": accuracy.item()}'
        raise ConfigurationError("evaluate must return numbers by name.", found=found, fix=fix) from error

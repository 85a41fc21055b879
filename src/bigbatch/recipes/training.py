"""Train a user's `Setup`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bigbatch.errors import ConfigurationError
from bigbatch.recipes.feeding import Feed
from bigbatch.recipes.updating import InLockStep, LossAsks, Way, way_of
from bigbatch.recipes.user_code import calling
from bigbatch.setup import Setup
from bigbatch.update import Update


@dataclass(frozen=True)
class Epoch:
    """One pass over the data."""

    updates: int
    skipped: int
    """Windows that made no update, as when none of their targets counted."""
    clipped: int | None
    """Updates whose gradient was larger than `clip_norm`; None where nothing is clipped."""
    loss: float | None
    """The mean of the updates' losses, each at the weights before its update, where they are known."""
    metrics: dict[str, float]
    seconds: float
    """Of training alone, without `evaluate`."""


@dataclass(frozen=True)
class Training:
    """A training, finished or as far as it has come."""

    batch_size: int
    micro_batch_size: int
    steps: int
    clip_norm: float | None
    epochs: tuple[Epoch, ...]
    peak_bytes: int | None
    """Peak of CUDA memory, where the model is there."""
    lock_step: bool = False
    """Whether samples are coupled, and the micro-batches of a batch meet, in a `BigStep`."""


def train_setup(
    setup: Setup,
    *,
    on_update: Callable[[int], None] = lambda epoch: None,  # noqa: ARG005
    on_epoch: Callable[[Training], None] = lambda training: None,  # noqa: ARG005
) -> Training:
    """Train for `setup.epochs`; `on_update(epoch)` is told of every update, epochs counted from 1.

    `on_epoch(training)` is told of every epoch when it is done, with all those before it.

    What the user's own code raises comes out as a `UserCodeError` that says which call it was.
    """
    device = next((parameter.device for parameter in setup.model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if not setup.model.training:  # as from_pretrained() returns it; else layers frozen by .eval() stay so
        setup.model.train()
    way = way_of(setup)
    training = Training(
        batch_size=setup.batch_size,
        micro_batch_size=max(setup.sizes),
        steps=setup.steps,
        clip_norm=setup.clip_norm,
        epochs=(),
        peak_bytes=None,
    )
    try:
        for number in range(1, setup.epochs + 1):
            of_it = Feed(setup, number), number, partial(on_update, number)
            epoch = _unless_it_asks(partial(_one_epoch, setup, way, *of_it))
            if epoch is None:
                way.leave()
                way = InLockStep(setup)
                epoch = _one_epoch(setup, way, *of_it)
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            epochs = (*training.epochs, epoch)
            training = replace(training, epochs=epochs, peak_bytes=peak, lock_step=way.lock_step)
            on_epoch(training)
    except BaseException:
        way.leave()
        raise
    return training


def _unless_it_asks(epoch: Callable[[], Epoch]) -> Epoch | None:
    """Run an epoch; None where its first loss asks for other micro-batches. Nothing of that loss is kept alive."""
    try:
        return epoch()
    except LossAsks:
        return None


def expected_updates(setup: Setup) -> int | None:
    """How many updates there will be, where the data has a length."""
    try:
        return setup.epochs * len(replace(setup, micro_batch_size=None).micro_batches())
    except TypeError:
        return None


def _one_epoch(setup: Setup, way: Way, feed: Feed, number: int, on_update: Callable[[], None]) -> Epoch:
    """One pass: train, then evaluate."""
    updates: list[Update] = []
    started = time.perf_counter()
    for update in way.updates(feed, number):
        updates.append(update)
        on_update()
    if not updates:
        raise ConfigurationError(
            f"Setup(data={type(setup.data).__name__}): it gave no sample in epoch {number}.\n"
            "An IterableDataset must begin anew each time that it is asked for its __iter__()."
        )
    # Read once, here: a loss is a tensor on the device, and reading it waits for the device.
    done = [update for update in updates if not update.skipped]
    clipped = None if setup.clip_norm is None else _larger_than(setup.clip_norm, done)
    mean_loss = _mean_loss(done)
    seconds = time.perf_counter() - started
    return Epoch(len(done), len(updates) - len(done), clipped, mean_loss, _evaluated(setup, number), seconds)


def _larger_than(clip_norm: float, updates: list[Update]) -> int:
    """How many gradients were larger before they were clipped."""
    norms = [update.grad_norm for update in updates if update.grad_norm is not None]
    return int((torch.stack(norms) > clip_norm).sum()) if norms else 0


def _mean_loss(updates: list[Update]) -> float | None:
    """Over updates, where there are any and their losses are known."""
    if not all(update.loss_is_exact for update in updates):  # several counts, whose terms' values no graph keeps
        return None
    losses = [update.loss.detach() for update in updates]
    return torch.stack(losses).double().mean().item() if losses else None


def _evaluated(setup: Setup, epoch: int) -> dict[str, float]:
    """The user's own numbers, in eval mode and without gradients."""
    if setup.evaluate is None:
        return {}
    modes = [(module, module.training) for module in setup.model.modules()]
    setup.model.eval()
    with torch.no_grad(), calling("evaluate", f"after epoch {epoch}"):
        metrics: Any = setup.evaluate(setup.model)
    for module, mode in modes:
        module.training = mode
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(
            f"evaluate is to return numbers by name; found {type(metrics).__name__}.\n"
            'Name them:  return {"accuracy": accuracy}'
        )
    return {str(name): _number(name, value) for name, value in metrics.items()}


def _number(name: object, value: Any) -> float:
    """One number of `evaluate`."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ConfigurationError(
            f"evaluate returned {name!r}: {type(value).__name__}{shape}, which is not a number.\n"
            f'Make it one:  return {{"{name}": value.mean().item()}}'
        ) from error

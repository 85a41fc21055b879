"""Train a user's `Setup` with an `Accumulator`, alone or as one of several processes."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bigbatch import setup_checks
from bigbatch.accumulator import Accumulator
from bigbatch.errors import ConfigurationError, LossError
from bigbatch.recipes.launching import Place
from bigbatch.recipes.sharing import Share
from bigbatch.recipes.user_code import calling, in_a_setups_words
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
    ranks: int = 1
    """Processes that have trained together; sizes, steps and memory are then those of the first."""


def train_setup(
    setup: Setup,
    *,
    on_update: Callable[[int], None] = lambda epoch: None,  # noqa: ARG005
    on_epoch: Callable[[Training], None] = lambda training: None,  # noqa: ARG005
    place: Place | None = None,
) -> Training:
    """Train for `setup.epochs`; `on_update(epoch)` is told of every update, epochs counted from 1.

    `on_epoch(training)` is told of every epoch when it is done, with all those before it.

    At a `place` among several processes each trains on its part of every batch, to the weights that one process would
    have come to. What the user's own code raises comes out as a `UserCodeError` that says which call it was.
    """
    setup_checks.refuse_shards(setup.model)
    share = None if place is None else Share(setup, place)
    steps = setup.steps if share is None else share.steps
    device = next((parameter.device for parameter in setup.model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with in_a_setups_words():
        accumulator = Accumulator(
            setup.model,
            setup.optimizer,
            steps=steps,
            clip_norm=setup.clip_norm,
            scheduler=setup.scheduler,
            scaler=setup.scaler,
            gradient_dtype=setup.gradient_dtype,
            batch_norm=setup.batch_norm,
            counts=_counts(setup),
            skip_nonfinite=setup.skip_nonfinite,
            group=None if share is None else share.group,
        )
    if not setup.model.training:  # as from_pretrained() returns it; else layers frozen by .eval() stay so
        setup.model.train()
    training = Training(
        batch_size=setup.batch_size,
        micro_batch_size=(setup.micro_batch_size or setup.batch_size) if share is None else share.micro_batch_size,
        steps=steps,
        clip_norm=setup.clip_norm,
        epochs=(),
        peak_bytes=None,
        ranks=1 if place is None else place.size,
    )
    try:
        for number in range(1, setup.epochs + 1):
            epoch = _one_epoch(setup, accumulator, number, partial(on_update, number), share)
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            training = replace(training, epochs=(*training.epochs, epoch), peak_bytes=peak)
            on_epoch(training)
    except BaseException:
        accumulator.discard()  # what ended here is no window that somebody forgot
        raise
    return training


def expected_updates(setup: Setup) -> int | None:
    """How many updates there will be, where the data has a length."""
    try:
        micro_batches = len(setup.micro_batches())
    except TypeError:
        return None
    return setup.epochs * -(-micro_batches // setup.steps)


def _one_epoch(
    setup: Setup, accumulator: Accumulator, number: int, on_update: Callable[[], None], share: Share | None
) -> Epoch:
    """One pass: train, then evaluate; of several ranks the first alone, for which the others wait."""
    updates: list[Update] = []
    micro_batches = 0
    started = time.perf_counter()
    for batch in accumulator.over(_batches(setup, number, share)):
        micro_batches += 1
        when = f"in epoch {number}, micro-batch {micro_batches}"
        with calling("model(**batch).loss" if setup.loss_fn is None else "loss_fn", when):
            loss = setup.loss(batch)
        with calling("the loss's backward, or the update after it,", when), in_a_setups_words():
            update = accumulator.backward(loss)
        if update is not None:
            updates.append(update)
            on_update()
    first = share is None or share.place.speaks
    if not micro_batches and first:  # which has a sample of every batch
        raise ConfigurationError(
            f"Setup(data={type(setup.data).__name__}): it gave no sample in epoch {number}.\n"
            "An IterableDataset must begin anew each time that it is asked for its __iter__()."
        )
    # Read once, here: a loss is a tensor on the device, and reading it waits for the device.
    done = [update for update in updates if not update.skipped]
    clipped = None if setup.clip_norm is None else _larger_than(setup.clip_norm, done)
    mean_loss = _mean_loss(done)
    seconds = time.perf_counter() - started
    if share is not None:
        share.end_epoch()
    metrics = _evaluated(setup, number) if first else {}
    return Epoch(len(done), len(updates) - len(done), clipped, mean_loss, metrics, seconds)


def _batches(setup: Setup, epoch: int, share: Share | None) -> Iterator[Any]:
    """The micro-batches of one pass."""
    with calling("making a batch of data", f"in epoch {epoch}"):
        yield from setup.micro_batches() if share is None else share.micro_batches()


def _counts(setup: Setup) -> Callable[[Any], Any] | None:
    """The user's `counts`, named where it fails."""
    theirs = setup.counts
    if theirs is None:
        return None

    def counts(batch: Any) -> Any:
        with calling("counts"):
            return theirs(batch)

    return counts


def _larger_than(clip_norm: float, updates: list[Update]) -> int:
    """How many gradients were larger before they were clipped."""
    norms = [update.grad_norm for update in updates if update.grad_norm is not None]
    return int((torch.stack(norms) > clip_norm).sum()) if norms else 0


def _mean_loss(updates: list[Update]) -> float | None:
    """Over updates, where there are any and their losses are known."""
    try:
        losses = [update.loss.detach() for update in updates]
    except LossError:  # several counts, whose terms' values no graph keeps
        return None
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

"""The two ways to train a `Setup`: one micro-batch after the other, or all of a batch in lock-step.

An `Accumulator` needs no more than one micro-batch at a time. Where samples are coupled it cannot be exact: then a
`BigStep`, which has the samples of a whole batch, lets its micro-batches meet.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import default_collate

from bigbatch import arguments
from bigbatch.accumulator import Accumulator
from bigbatch.big_step import BigStep
from bigbatch.errors import CoupledLoss
from bigbatch.options import Options
from bigbatch.recipes.feeding import Feed
from bigbatch.recipes.user_code import calling, in_a_setups_words
from bigbatch.setup import Setup
from bigbatch.state.scope import times_asked
from bigbatch.state.snapshot import Buffers, Randomness, devices_of
from bigbatch.update import Update

_LATE = (
    "loss_fn: this loss asks for all samples of the big batch (bigbatch.across) {when}, and did not in the first "
    "micro-batch, so that micro-batches run one after the other.\n"
    "Have it ask from the first one on, by a term that counts nothing where it is not wanted:  loss + 0.0 * term"
)


class LossAsks(Exception):
    """The first loss has asked for other micro-batches; nothing was updated, and all is as it was."""


class Way(Protocol):
    """How updates are made of samples."""

    lock_step: bool

    def updates(self, feed: Feed, epoch: int) -> Iterator[Update]:
        """Make one after the other, of one pass over the samples."""
        ...

    def leave(self) -> None:
        """End, wherever it is: what is left here is no window that somebody forgot."""
        ...


def way_of(setup: Setup) -> Way:
    """Take the way that a model asks for; a loss may ask for another one (`LossAsks`)."""
    norms = arguments.batch_norms([setup.model])
    if setup.batch_norm == "exact" and any(arguments.is_awake(module) for _, module in norms):
        return InLockStep(setup)
    return OneByOne(setup)


class OneByOne:
    """An `Accumulator` adds up one micro-batch after the other."""

    lock_step = False

    def __init__(self, setup: Setup) -> None:
        """Make the accumulator."""
        self._setup, self._looked = setup, False
        with in_a_setups_words():
            self._accumulator = Accumulator(
                setup.model,
                setup.optimizer,
                steps=setup.steps,
                clip_norm=setup.clip_norm,
                scheduler=setup.scheduler,
                scaler=setup.scaler,
                gradient_dtype=setup.gradient_dtype,
                # A norm that is met exactly rests here, or another way had been taken; it may wake up.
                batch_norm="micro" if setup.batch_norm == "micro" else "refuse",
                counts=_counts(setup),
                skip_nonfinite=setup.skip_nonfinite,
            )

    def updates(self, feed: Feed, epoch: int) -> Iterator[Update]:
        """Make one after the other; raises `LossAsks` where the very first loss cannot be had alone."""
        if self._looked:
            feed.settle()
        for number, batch in enumerate(self._accumulator.over(feed.micro_batches()), 1):
            when = f"in epoch {epoch}, micro-batch {number}"
            loss = self._loss(batch, when) if self._looked else self._first_loss(batch, when, feed)
            with calling("the loss's backward, or the update after it,", when), in_a_setups_words():
                update = self._accumulator.backward(loss)
            if update is not None:
                yield update

    def leave(self) -> None:
        """Drop the open window."""
        self._accumulator.discard()

    def _loss(self, batch: Any, when: str) -> Tensor:
        before = times_asked()
        loss = self._plain_loss(batch, when)
        if times_asked() != before:
            raise CoupledLoss(_LATE.format(when=when))
        return loss

    def _first_loss(self, batch: Any, when: str, feed: Feed) -> Tensor:
        """Compute the first of all losses, and see whether it asks for others."""
        model, before = self._setup.model, times_asked()
        buffers, randomness = Buffers([model]), Randomness(devices_of([model]))
        loss = self._plain_loss(batch, when)
        self._looked = True
        if times_asked() != before:
            buffers.restore()
            randomness.restore()
            raise LossAsks
        feed.settle()
        return loss

    def _plain_loss(self, batch: Any, when: str) -> Tensor:
        with calling("model(**batch).loss" if self._setup.loss_fn is None else "loss_fn", when):
            return self._setup.loss(batch)


class InLockStep:
    """A `BigStep` has the samples of a batch at once, and its micro-batches meet."""

    lock_step = True

    def __init__(self, setup: Setup) -> None:
        """Make the step."""
        with in_a_setups_words():
            self._step = BigStep(
                setup.model,
                setup.optimizer,
                setup.loss_fn,
                micro_batch_size=setup.micro_batch_size or setup.batch_size,
                clip_norm=setup.clip_norm,
                scheduler=setup.scheduler,
                scaler=setup.scaler,
                options=Options(
                    collate=setup.collate or default_collate,
                    batch_norm=setup.batch_norm,
                    gradient_dtype=setup.gradient_dtype,
                    skip_nonfinite=setup.skip_nonfinite,
                ),
            )

    def updates(self, feed: Feed, epoch: int) -> Iterator[Update]:
        """Make one after the other."""
        for number, batch in enumerate(feed.batches(), 1):
            with calling("loss_fn, or the update it is in,", f"in epoch {epoch}, update {number}"), in_a_setups_words():
                update = self._step(batch)
            yield update

    def leave(self) -> None:
        """Leave nothing: a step is made, or has changed nothing."""


def _counts(setup: Setup) -> Callable[[Any], Any] | None:
    """The user's `counts`, named where it fails."""
    theirs = setup.counts
    if theirs is None:
        return None

    def counts(batch: Any) -> Any:
        with calling("counts"):
            return theirs(batch)

    return counts

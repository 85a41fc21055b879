"""Three ways to write the same training: one update per batch, the textbook's accumulation, and this library's.

Each takes the epochs as iterables of micro-batches and yields at the end of each, where others may look at the
model: the norms of the epoch's gradients before they were clipped, none where they are not clipped. They are written
as a person would write them in a script, and are the only place where the arms differ.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from bigbatch.accumulator import Accumulator

MicroBatches = Iterable[tuple[Tensor, Tensor]]
Norms = list[Tensor]
Loop = Callable[[nn.Module, Optimizer, Iterable[MicroBatches], int, float | None], Iterator[Norms]]


def plain_loop(
    model: nn.Module, optimizer: Optimizer, epochs: Iterable[MicroBatches], steps: int, clip_norm: float | None
) -> Iterator[Norms]:
    """One update per batch; `steps` is always 1."""
    assert steps == 1, "nothing is accumulated here"  # noqa: S101
    for batches in epochs:
        norms: Norms = []
        for inputs, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            if clip_norm is not None:
                norms.append(clip_grad_norm_(model.parameters(), clip_norm))
            optimizer.step()
        yield norms


def textbook_loop(
    model: nn.Module, optimizer: Optimizer, epochs: Iterable[MicroBatches], steps: int, clip_norm: float | None
) -> Iterator[Norms]:
    """The accumulation that the teaching pages print, kept as it is, with what is wrong in it.

    A leftover of fewer than `steps` micro-batches is never stepped and is cleared at the next epoch's start; and
    every micro-batch weighs 1 / `steps`, whatever its size.
    """
    for batches in epochs:
        norms: Norms = []
        optimizer.zero_grad(set_to_none=True)
        for i, (inputs, labels) in enumerate(batches):
            loss = cross_entropy(model(inputs), labels)
            loss = loss / steps
            loss.backward()
            if (i + 1) % steps == 0:
                if clip_norm is not None:
                    norms.append(clip_grad_norm_(model.parameters(), clip_norm))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        yield norms


def bigbatch_loop(
    model: nn.Module, optimizer: Optimizer, epochs: Iterable[MicroBatches], steps: int, clip_norm: float | None
) -> Iterator[Norms]:
    """The same with an `Accumulator`: every sample counts once, and the last window is a window."""
    accumulator = Accumulator(model, optimizer, steps=steps, clip_norm=clip_norm)
    for batches in epochs:
        norms: Norms = []
        for inputs, labels in accumulator.over(batches):
            update = accumulator.backward(cross_entropy(model(inputs), labels))
            if update is not None and update.grad_norm is not None:
                norms.append(update.grad_norm)
        yield norms

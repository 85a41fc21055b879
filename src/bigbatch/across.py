"""What a loss or a model may know of all samples of a big batch, though it sees one micro-batch at a time.

    from bigbatch import BigStep, across

    def clip_loss(model, batch):
        images, texts, scale = model(batch)                       # of this micro-batch
        all_texts, all_images = across.gather(texts), across.gather(images)
        mine = across.offset() + torch.arange(len(images), device=images.device)
        rows = F.cross_entropy(scale * images @ all_texts.T, mine)
        columns = F.cross_entropy(scale * texts @ all_images.T, mine)
        return (rows + columns) / 2

Inside `BigStep` the micro-batches of a batch run in lock-step and meet here, in forward and in backward: gradients are
those of the big batch. Anywhere else a batch is the whole batch, and these are what they say of it alone: `gather`,
`sum` and `mean` return their argument. An `Accumulator` sees one micro-batch after the other, and refuses such a loss.
"""

import builtins
import os
import sys

import torch
from torch import Tensor

from bigbatch.errors import LossError
from bigbatch.lockstep.collectives import shared
from bigbatch.lockstep.threads import Worker, current
from bigbatch.loss.count import LOW_PRECISION, counted
from bigbatch.state.scope import refuse_alone

__all__ = ["gather", "mean", "offset", "once", "sum"]


def gather(x: Tensor) -> Tensor:
    """Return the rows of all micro-batches, one below the other, in the order in which they run.

    That is the batch's own, unless `Options(lengths=...)` sorts it; `offset` knows where yours begin in either case.
    They are one tensor for all micro-batches: change them in place, and an error says so.
    """
    worker = _asked(x, "gather")
    if not x.dim():
        raise LossError("across.gather takes rows, one per sample.", found="a 0-d tensor", fix="across.sum(x)")
    return refuse_alone(x, "gather") if worker is None else shared(worker, x, "gather", _called_from())


def sum(x: Tensor) -> Tensor:  # noqa: A001 - it is called as across.sum
    """Add up a tensor of one shape over all micro-batches: a sum over the big batch, where x is one over this."""
    worker = _asked(x, "sum")
    if x.dtype == torch.bool:
        x = x.long()  # how many are true
    return refuse_alone(x, "sum") if worker is None else shared(worker, x, "sum", _called_from())


def mean(x: Tensor, count: float | Tensor | None = None) -> Tensor:
    """Average a tensor of one shape over all micro-batches: a mean over the big batch, where x is one over this.

    Each micro-batch weighs as many samples as it has, or `count`, the number of things that its mean is over.
    """
    worker = _asked(x, "mean")
    if worker is None:
        return refuse_alone(x, "mean")
    place = _called_from()
    if count is None:
        share = worker.round.sizes[worker.number] / float(worker.round.all_samples)
        return shared(worker, x * share, "mean", place)
    number = torch.as_tensor(count, dtype=torch.float64)  # one, or one of each value, as of each class
    if number.requires_grad or (number.device.type == "cpu" and (number < 0).any()):  # no wait for a device
        found = f"{float(number.detach().min()):g}{' with gradient' if number.requires_grad else ''}"
        raise LossError("the count of across.mean is a number of things, without gradient.", found=found)
    number = number.to(x.device)
    wide = x.float() if x.dtype in LOW_PRECISION else x
    # A mean over nothing is NaN, and counts nothing.
    own = torch.where(number > 0, wide * number.to(wide.dtype), torch.zeros_like(wide))
    every = shared(worker, number, "mean", place)
    return (shared(worker, own, "mean", place) / every.to(wide.dtype)).to(x.dtype)


def offset() -> int:
    """Return how many samples come before this micro-batch's, on all ranks: where its rows begin in `gather`."""
    worker = current()
    if worker is None:
        refuse_alone(None, "offset")
        return 0
    return worker.round.samples_before + builtins.sum(worker.round.sizes[: worker.number])


def once(term: Tensor) -> Tensor:
    """Say that a term is made of gathered, summed or averaged values alone, the same in every micro-batch.

    It then counts once in the big batch's loss, not once per micro-batch.
    """
    worker = _asked(term, "once")
    if term.dim():
        raise LossError("across.once takes a 0-d tensor, a term of the loss.", found=f"shape {tuple(term.shape)}")
    if worker is None:
        return counted(refuse_alone(term, "once"), "once")
    marked = worker.round.marked[worker.number]
    marked.append((_called_from(), term.detach()))  # compared when all micro-batches have a loss
    return counted(term, "once")


def _asked(x: object, name: str) -> Worker | None:
    """Return who asks for the others, if there are any."""
    if not isinstance(x, Tensor):
        raise LossError(f"across.{name} takes a tensor.", found=type(x).__name__)
    return current()


def _called_from() -> str:
    """Name the line that asked, by which micro-batches know that they are at the same place."""
    frame = sys._getframe(2)  # noqa: SLF001 - as `warnings` has it
    return f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"  # noqa: PTH119 - on the way of all

"""Derivatives inside of a loss, as an adversarial attack takes them, that go through a meeting.

There the gradients of all micro-batches' inner losses are added up. Of sums over samples that is the big batch's. Of
means, each over a micro-batch's own samples, it is not: what they weigh in the big batch's mean is known of the loss
that a step returns, and not of one that is used up inside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bigbatch.errors import LossError
from bigbatch.lockstep.crew import Worker, current
from bigbatch.lockstep.swapping import Swap, swapped


@contextmanager
def derivatives_known() -> Iterator[None]:
    """Have it known, on workers, what inner derivatives are of."""
    with swapped(_swap):
        yield


def refuse_inner_mean(worker: Worker, title: str) -> None:
    """Raise in the backward of a meeting that belongs to a derivative inside of a loss, if that is not of a sum."""
    if worker.number in worker.notes.get(_OF_MEANS, ()):
        msg = (
            f"a derivative inside of the loss goes through {title}, and is of a mean over this micro-batch, or of "
            "something that cannot be told from one: micro-batches' means do not add up to the big batch's.\n"
            "Take it of a sum over samples, and scale that as you need:  torch.autograd.grad(F.cross_entropy(scores, "
            'labels, reduction="sum"), x)'
        )
        raise LossError(msg)


def _knowing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *arguments: Any, **named: Any) -> Any:
        worker = current()
        if worker is None or not worker.notes.get("inside"):
            return plain(outputs, inputs, grad_outputs, *arguments, **named)
        if grad_outputs is not None or _is_sum(worker, outputs):  # who gives gradients to begin with, weighs by himself
            return plain(outputs, inputs, grad_outputs, *arguments, **named)
        of_means: set[int] = worker.notes.setdefault(_OF_MEANS, set())
        of_means.add(worker.number)
        try:
            return plain(outputs, inputs, grad_outputs, *arguments, **named)
        finally:
            of_means.discard(worker.number)

    return grad


def _is_sum(worker: Worker, outputs: Any) -> bool:
    read: Callable[[Tensor], set[str]] = worker.notes["inside"]
    try:
        return all(read(each) <= {"sum", "once"} for each in tree_leaves(outputs))
    except LossError:
        return False


_OF_MEANS = "derivatives of means"  # the micro-batches that are in one
_swap = Swap(torch.autograd, "grad", _knowing)

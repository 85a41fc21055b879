"""Derivatives inside of a loss, as an adversarial attack takes them, that go through a meeting.

There the gradients of all micro-batches' inner losses are added up. Of sums over samples that is the big batch's. Of
means, each over a micro-batch's own samples, it is not: what they weigh in the big batch's mean is known of the loss
that a step returns, and not of one that is used up inside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigbatch.errors import LossError
from bigbatch.lockstep.threads import Worker, current
from bigbatch.state.patch import Swap, swapped


@contextmanager
def derivatives_known() -> Iterator[None]:
    """Have it known, on workers, what inner derivatives are of."""
    with swapped(*_swaps):
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
        with _of(outputs, grad_outputs):
            return plain(outputs, inputs, grad_outputs, *arguments, **named)

    return grad


def _knowing_backward(plain: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **named: Any) -> None:
        # As in inner.backward(inputs=[x]). Where it adds to weights, it is another mistake, which a window tells of.
        disturbs = current() is not None and named.get("inputs") is None and _reaches_weights(tensors)
        with nullcontext() if disturbs else _of(tensors, grad_tensors):
            plain(tensors, grad_tensors, *arguments, **named)

    return backward


@contextmanager
def _of(outputs: Any, gradients: Any) -> Iterator[None]:
    """Know of a derivative of some outputs while it is taken; `gradients` are what it begins with."""
    worker = current()
    if worker is None or not worker.notes.get("inside"):
        yield
        return
    of_means: set[int] = worker.notes.setdefault(_OF_MEANS, set())
    within = worker.number in of_means  # of another one
    if within or gradients is not None or _is_sum(worker, outputs):  # who gives gradients, weighs by himself
        yield
        return
    of_means.add(worker.number)
    try:
        yield
    finally:
        of_means.discard(worker.number)


def _reaches_weights(outputs: Any) -> bool:
    nodes: list[Any] = [each.grad_fn for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        nodes += [below for below, _ in node.next_functions]
    return False


def _is_sum(worker: Worker, outputs: Any) -> bool:
    read: Callable[[Tensor], set[str]] = worker.notes["inside"]
    try:
        return all(read(each) <= {"sum", "once"} for each in tree_leaves(outputs))
    except LossError:
        return False


_OF_MEANS = "derivatives of means"  # the micro-batches that are in one
_swaps = (Swap(torch.autograd, "grad", _knowing), Swap(torch.autograd, "backward", _knowing_backward))

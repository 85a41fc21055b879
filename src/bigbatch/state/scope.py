"""What runs a micro-batch on this thread: nobody, `BigStep` one after the other, or a worker in lock-step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from bigbatch.errors import BigBatchError


class _Here(threading.local):
    """What is known of this thread."""

    worker: Any = None
    alone = False  # whether micro-batches of a window run here one after the other
    asked = asked_in_training = 0  # how often others were asked for where there were none


_here = _Here()
Value = TypeVar("Value", bound=Tensor | None)


class NeedsLockStep(BigBatchError):
    """Raised inside a window that runs one micro-batch after the other; `BigStep` then runs them side by side."""


def worker() -> Any:
    """Return the worker in lock-step that this thread is, or None."""
    return _here.worker


def become(worker: object) -> None:
    """Have this thread be a worker in lock-step; None: no longer."""
    _here.worker = worker


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Say that micro-batches of a window run here, and that they could run side by side instead."""
    before, _here.alone = _here.alone, True
    try:
        yield
    finally:
        _here.alone = before


asked_anywhere = [0]  # how often others were asked for where there were none, on any thread: a number to be had quickly


def times_asked(*, in_training: bool = False) -> int:
    """Return how often that was on this thread; `in_training`, with gradients enabled, which validation has not."""
    return _here.asked_in_training if in_training else _here.asked


@contextmanager
def asked_aside() -> Iterator[None]:
    """Have what is asked for inside, on this thread, be no part of a loss that comes after it."""
    before = _here.asked, _here.asked_in_training
    try:
        yield
    finally:
        _here.asked, _here.asked_in_training = before


def refuse_alone(x: Value, name: str) -> Value:
    """Return a value that is the whole batch's, as it is; in a window of micro-batches ask for lock-step instead."""
    if _here.alone:
        raise NeedsLockStep(f"across.{name}")
    asked_anywhere[0] += 1
    _here.asked += 1
    _here.asked_in_training += torch.is_grad_enabled()
    if x is None or not x.requires_grad:
        return x
    found: Value = _Alone.apply(x)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return found


class _Alone(torch.autograd.Function):
    """An identity in the graph, by which an `Accumulator` knows a loss that asked for other micro-batches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]

"""What runs a micro-batch on this thread: nobody, `BigStep` one after the other, or a worker in lock-step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from bigbatch.errors import BigBatchError

_here = threading.local()
Value = TypeVar("Value", bound=Tensor | None)


class NeedsLockStep(BigBatchError):
    """Raised inside a window that runs one micro-batch after the other; `BigStep` then runs them side by side."""


def worker() -> Any:
    """Return the worker in lock-step that this thread is, or None."""
    return getattr(_here, "worker", None)


def become(worker: object) -> None:
    """Have this thread be a worker in lock-step; None: no longer."""
    _here.worker = worker


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Say that micro-batches of a window run here, and that they could run side by side instead."""
    before = getattr(_here, "alone", False)
    _here.alone = True
    try:
        yield
    finally:
        _here.alone = before


asked_anywhere = [0]  # how often others were asked for where there were none, on any thread: a number to be had quickly


def times_asked(*, in_training: bool = False) -> int:
    """Return how often that was on this thread; `in_training`, with gradients enabled, which validation has not."""
    found: int = getattr(_here, "asked_in_training" if in_training else "asked", 0)
    return found


@contextmanager
def asked_aside() -> Iterator[None]:
    """Have what is asked for inside, on this thread, be no part of a loss that comes after it."""
    before = times_asked(), times_asked(in_training=True)
    try:
        yield
    finally:
        _here.asked, _here.asked_in_training = before


@contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Have a function called, on this thread, where micro-batches would meet if there were others."""
    before = getattr(_here, "listener", None)
    try:
        _here.listener = listener
        yield
    finally:
        _here.listener = before


def would_meet() -> None:
    """Say so."""
    listener: Callable[[], None] | None = getattr(_here, "listener", None)
    if listener is not None:
        listener()


def refuse_alone(x: Value, name: str) -> Value:
    """Return a value that is the whole batch's, as it is; in a window of micro-batches ask for lock-step instead."""
    if getattr(_here, "alone", False):
        raise NeedsLockStep(f"across.{name}")
    asked_anywhere[0] += 1
    _here.asked = times_asked() + 1
    if torch.is_grad_enabled():
        _here.asked_in_training = times_asked(in_training=True) + 1
    if x is not None:
        would_meet()
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

"""What a worker's thread has of the caller's: torch's state of a thread, and the processor.

Grad mode, autocast, function and dispatch modes, the current device and stream all belong to one
thread. A micro-batch must run on its worker as it would have run on the thread that called the step.

On a device, threads that take turns only launch work. Where each has a processor of its own, every turn begins on one
that sleeps: launching a ResNet's kernels from sixteen threads took half as long again. So all stay on one processor.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, copy_context
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Autocasts = tuple[tuple[str, torch.dtype, bool, bool], ...]  # of each kind: whether enabled, whether it caches weights
Result = TypeVar("Result")


def autocasts() -> Autocasts:
    """Return those of this thread."""
    caching = torch.is_autocast_cache_enabled()
    kinds = ("cpu", "cuda")
    return tuple((k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k), caching) for k in kinds)


@contextmanager
def under(states: Autocasts) -> Iterator[None]:
    """Put these into force."""
    with ExitStack() as stack:
        for kind, dtype, enabled, caching in states:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=caching))
        yield


@dataclass(frozen=True)
class Carried:
    """The state of the thread that it was taken on."""

    grad: bool
    autocasts: Autocasts
    modes: tuple[Any, ...]
    stream: torch.cuda.Stream | None
    processor: int | None
    context: Context

    @classmethod
    def here(cls, device: torch.device) -> "Carried":
        """Take the state of this thread."""
        on_cuda = device.type == "cuda"
        return cls(
            grad=torch.is_grad_enabled(),
            autocasts=autocasts(),
            modes=(*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()),
            stream=torch.cuda.current_stream(device) if on_cuda else None,
            processor=this_processor() if on_cuda else None,
            context=copy_context(),
        )

    def call(self, function: Callable[..., Result], *given: Any) -> Result:
        """Call a function under that state, on this thread, where nothing is in force yet."""
        with ExitStack() as stack:
            stack.enter_context(staying_on(self.processor))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(under(self.autocasts))
            for mode in self.modes:
                # A default device remembers what was before it: each thread has its own.
                stack.enter_context(copy(mode) if isinstance(mode, DeviceContext) else mode)
            # Backward runs on the thread that calls it, so that it can wait for the others there.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            return self.context.copy().run(function, *given)


@cache
def _start_engine() -> None:
    """Have torch start its own threads for backward, here: they would stay where the thread that starts them must."""
    torch.ones((), requires_grad=True, device="cpu").backward()


def this_processor() -> int | None:
    """Return where this thread runs now; None where the system does not tell.

    Asked for every window: a crew that stayed where it was for 64 windows took 3 to 9 % longer.
    """
    _start_engine()
    with suppress(AttributeError, OSError, TypeError):
        return int(ctypes.CDLL(None).sched_getcpu())
    return None


@contextmanager
def staying_on(processor: int | None) -> Iterator[None]:
    """Keep this thread on a processor inside, where that is possible."""
    if processor is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        with suppress(OSError):  # the system has other plans
            os.sched_setaffinity(0, {processor})
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def wait_when_woken() -> None:
    """Have this thread, when it is woken, wait until whoever runs there sleeps: one switch a turn instead of three.

    Linux would rather let the one that was woken run at once, only to find that Python's lock is still held.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

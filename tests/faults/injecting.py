"""Exceptions that come once: at the k-th operation of torch, a place of a step, a call of a function of bigbatch."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bigbatch

PACKAGE = str(Path(bigbatch.__file__).parent)


class Spilled(Exception):
    """A user's own error, which cannot be made anew from its text."""

    def __init__(self, where: str, *, litres: int) -> None:
        super().__init__(where, litres)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("device-side assert triggered"),
    "user's own": lambda: Spilled("coffee", litres=2),
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "CUDA error": lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "CPU allocator": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"
    ),
}
OUT_OF_MEMORY = frozenset(ERRORS) - {"RuntimeError", "user's own", "KeyboardInterrupt"}
STOPS = {"SIGKILL": 0.0, "SIGSTOP": 0.3, "SIGSTOP for long": 6.0}  # of the process, and for how many seconds


class Fault:
    """Counts what is passed by; makes its error once, when `name` is passed for the `at`-th time.

    Where `again` is given, it is made once more so many times later, while the first one is being dealt with.
    """

    def __init__(self, name: str = "", at: int = 0, error: str = "", again: int = 0) -> None:
        self.name, self.error_name = name, error
        self.left = [at, at + again] if again else [at]  # the times that are still to come
        self.seen: Counter[str] = Counter()
        self.reached = False
        self.raised: list[BaseException] = []
        self.active = self.printed = False  # printed: by Python, since it ended a thread

    def visit(self, name: str) -> None:
        """Pass by a place, and raise the error there; an interrupt goes to the main thread, as a keyboard's does."""
        if not self.active:
            return
        self.seen[name] += 1
        if name != self.name or not self.left or self.seen[name] != self.left[0]:
            return
        self.left.pop(0)
        self.reached = True
        if self.error_name in STOPS:
            subprocess.Popen(["/bin/sh", "-c", f"sleep {STOPS[self.error_name]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGKILL if self.error_name == "SIGKILL" else signal.SIGSTOP)
            return
        error = ERRORS[self.error_name]()
        self.raised.append(error)
        main = threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not main:
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT)
            return
        raise error

    def around(self, function: Callable[..., Any], before: str, after: str = "") -> Callable[..., Any]:
        """Return the function with places before and after it."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.visit(before)
            found = function(*arguments, **named)
            if after:
                self.visit(after)
            return found

        return call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is passed by: what watches a program is no part of it."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def is_own(self, error: BaseException) -> bool:
        """Whether an error is one that was raised here; an interrupt is made anew by its signal."""
        interrupt = self.error_name == "KeyboardInterrupt" and isinstance(error, KeyboardInterrupt)
        return interrupt or any(error is each for each in self.raised)

    def is_behind(self, error: BaseException) -> bool:
        """Whether an error is the one that was raised, or was raised because of it."""
        return any(self.is_own(each) for each in chain(error))


def chain(error: BaseException, *by: str) -> list[BaseException]:
    """Return an error with all that it was raised from or while handling."""
    found = [error]
    for each in found:
        below = [getattr(each, name) for name in by or ("__cause__", "__context__")]
        found += [e for e in below if e is not None and all(e is not f for f in found)]
    return found


class _Operations(TorchDispatchMode):
    """Passes by "op" at every operation, in forward, backward and the optimizer's step."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass by, then run it."""
        self.fault.visit("op")
        return func(*args, **(kwargs or {}))


@contextmanager
def injecting(fault: Fault, *kinds: str) -> Iterator[None]:
    """Inside, operations ("op") and calls ("call") pass by the fault, also in threads that are started here."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and fault.active and code.co_filename.startswith(PACKAGE):
            module = code.co_filename[len(PACKAGE) + 1 : -3].replace("/", ".")
            fault.visit(f"call {module}:{getattr(code, 'co_qualname', code.co_name)}")

    plain = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Operations(fault):
            plain(thread)

    with ExitStack() as stack:
        if "op" in kinds:
            stack.enter_context(patch.object(threading.Thread, "run", run))
            stack.enter_context(_Operations(fault))
        if "call" in kinds:
            stack.callback(threading.setprofile, None)
            stack.callback(sys.setprofile, None)
            threading.setprofile(profile)
            sys.setprofile(profile)
        fault.active = True
        try:
            yield
        finally:
            fault.active = False

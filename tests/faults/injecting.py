"""Exceptions that come once: at the k-th operation of torch, a place of a step, a call of a function of bigbatch."""

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 41000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
}
OUT_OF_MEMORY = frozenset(ERRORS) - {"RuntimeError", "user's own", "KeyboardInterrupt"}


class Fault:
    """Counts what is passed by; raises its error once, when `name` is passed for the `at`-th time.

    Where `again` is given, it is raised once more so many times later, while the first one is being dealt with.
    """

    def __init__(self, name: str = "", at: int = 0, error: str = "", again: int = 0) -> None:
        self.name, self.error_name = name, error
        self.left = [at, at + again] if again else [at]  # the times that are still to come
        self.seen: Counter[str] = Counter()
        self.raised: list[BaseException] = []
        self.active = False

    def visit(self, name: str) -> None:
        """Pass by a place."""
        if not self.active:
            return
        self.seen[name] += 1
        if name == self.name and self.left and self.seen[name] == self.left[0]:
            self.left.pop(0)
            self.fire()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is passed by: what watches a program is no part of it."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def fire(self) -> None:
        """Raise the error; an interrupt goes to the main thread, as those of a keyboard do."""
        error = ERRORS[self.error_name]()
        self.raised.append(error)
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not threading.main_thread():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            return
        raise error

    def is_own(self, error: BaseException) -> bool:
        """Whether an error is one that was raised here; an interrupt is made anew by its signal."""
        interrupt = self.error_name == "KeyboardInterrupt" and isinstance(error, KeyboardInterrupt)
        return interrupt or any(error is each for each in self.raised)

    def is_behind(self, error: BaseException | None) -> bool:
        """Whether an error is the one that was raised, or was raised because of it."""
        found, seen = [error], set[int]()
        while found:
            each = found.pop()
            if each is None or id(each) in seen:
                continue
            if self.is_own(each):
                return True
            seen.add(id(each))
            found += [each.__cause__, each.__context__]
        return False


class _Operations(TorchDispatchMode):
    """Passes by "op" at every operation, in forward, backward and the optimizer's step."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass by, then run it."""
        self.fault.visit("op")
        return func(*args, **(kwargs or {}))


def call_name(frame: FrameType) -> str | None:
    """Return the name of a function of bigbatch that is being called."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return None
    module = code.co_filename[len(PACKAGE) + 1 : -3].replace("/", ".")
    return f"call {module}:{getattr(code, 'co_qualname', code.co_name)}"


@contextmanager
def injecting(fault: Fault, *kinds: str) -> Iterator[None]:
    """Inside, operations ("op") and calls ("call") pass by the fault, also in threads that are started here."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and fault.active:
            name = call_name(frame)
            if name is not None:
                fault.visit(name)

    with ExitStack() as stack:
        if "op" in kinds:
            plain = threading.Thread.run

            def run(thread: threading.Thread) -> None:
                with _Operations(fault):
                    plain(thread)

            stack.callback(setattr, threading.Thread, "run", plain)
            setattr(threading.Thread, "run", run)  # noqa: B010 - mypy minds the plain way
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

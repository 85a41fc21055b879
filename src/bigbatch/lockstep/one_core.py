"""One processor for threads that take turns.

Only one of them runs at a time. Where each has a processor of its own, every turn begins on one that sleeps and whose
caches know nothing of what comes: launching a ResNet's kernels from sixteen threads took half as long again. On one
processor a turn is a switch between two threads, as if there were one.

For windows on a device alone: there the threads only launch work. A processor's own work is shared out among all.

Whoever passes the baton runs on for a moment before it waits. Linux would rather let the one that was woken run at
once, only to find that Python's lock is still held: back, and forth once more. Threads that say they are a batch job
wait until the other one sleeps, and a turn is one switch instead of three.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

_STAT = Path("/proc/thread-self/stat")
_PROCESSOR = 36  # its place behind the name in brackets, which may hold spaces


def this_processor() -> int | None:
    """Return where this thread runs, now; None where the system does not tell.

    Asked for every window anew: whoever else is at work has been given other processors by then. A crew that stayed
    where it was for 64 windows took 3 to 9 % longer.
    """
    _start_engine()
    try:
        return int(_STAT.read_text().rpartition(")")[2].split()[_PROCESSOR])
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def staying_on(processor: int | None) -> Iterator[None]:
    """Have this thread run there and nowhere else inside, where that is possible."""
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
    """Have this thread, when it is woken, wait until whoever runs there sleeps, where the system knows of such."""
    if hasattr(os, "sched_setscheduler") and hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@cache
def _start_engine() -> None:
    """Have torch start its own threads for backward, here: they would stay where the thread that starts them must."""
    torch.ones((), requires_grad=True, device="cpu").backward()

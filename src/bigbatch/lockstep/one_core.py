"""One processor for threads that take turns.

Only one of them runs at a time. Where each has a processor of its own, every turn begins on one that sleeps and whose
caches know nothing of what comes: launching a ResNet's kernels from sixteen threads took half as long again. On one
processor a turn is a switch between two threads, as if there were one.

For windows on a device alone: there the threads only launch work. A processor's own work is shared out among all.
"""

import os
from contextlib import suppress
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


def stay_on(processor: int) -> None:
    """Have this thread run there, and nowhere else, where that is possible."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # the system has other plans
            os.sched_setaffinity(0, {processor})


@cache
def _start_engine() -> None:
    """Have torch start its own threads for backward, here: they would stay where the thread that starts them must."""
    torch.ones((), requires_grad=True, device="cpu").backward()

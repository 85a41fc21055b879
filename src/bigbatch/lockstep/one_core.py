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
_STAYS = 64  # windows


class Place:
    """Which processor it is: the caller's own, chosen anew now and then."""

    def __init__(self) -> None:
        """Have none yet."""
        self._processor: int | None = None
        self._windows = 0

    def now(self) -> int | None:
        """Return it, for a window that begins; None where the system does not tell.

        Whoever else is at work has been given other processors than the caller's; that may change, so it is not for
        ever.
        """
        if self._windows % _STAYS == 0:
            _start_engine()
            self._processor = _this_processor()
        self._windows += 1
        return self._processor


def stay_on(processor: int) -> None:
    """Have this thread run there, and nowhere else, where that is possible."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # the system has other plans
            os.sched_setaffinity(0, {processor})


def _this_processor() -> int | None:
    try:
        return int(_STAT.read_text().rpartition(")")[2].split()[_PROCESSOR])
    except (OSError, ValueError, IndexError):
        return None


@cache
def _start_engine() -> None:
    """Have torch start its own threads for backward, here: they would stay where the thread that starts them must."""
    torch.ones((), requires_grad=True, device="cpu").backward()

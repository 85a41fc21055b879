"""Running out of memory: recognize it, and let go of what it holds."""

import gc
import re
import traceback

import torch

_SAID = re.compile(
    r"out of memory|(can't|cannot) allocate memory|not enough memory|alloc(ation)?_failed|bad_alloc", re.IGNORECASE
)
_MISSING = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell an allocation that failed, on a device, in one of its libraries or on the host, from all else."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = isinstance(error, RuntimeError) and _SAID.search(str(error))
    return bool(said) or is_out_of_memory(error.__cause__)  # a compiler or a wrapper may have raised its own on top


def missing(error: BaseException) -> str:
    """Say how much an allocation had asked for, where the error tells."""
    told = _MISSING.search(str(error))
    return f"the allocation that failed asked for {told[1]}" if told else "the error does not say how much"


def let_go(error: BaseException, *, told: bool = False) -> None:
    """Free the activations that the frames of a traceback hold, and give cached memory back to the device.

    An error that will be `told` keeps its lines, without what was in them.
    """
    found: BaseException | None = error
    while found is not None:
        if found.__traceback__ is not None:
            traceback.clear_frames(found.__traceback__)
            if not told:
                found.__traceback__ = None
        found = found.__cause__ or found.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

"""What a plan has to say of models whose samples are coupled."""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch import arguments
from bigbatch.memory.budget import human
from bigbatch.memory.host import host_available
from bigbatch.planner.plan_report import Plan
from bigbatch.planner.waiting import Waiting
from bigbatch.state.patch import Swap, swapped
from bigbatch.state.scope import would_meet


@contextmanager
def single_samples() -> Iterator[None]:
    """Let BatchNorm take a single sample, as it does beside others; what it keeps of one is of no use."""
    before = getattr(_here, "single", False)
    try:
        _here.single = True
        with swapped(_swap):
            yield
    finally:
        _here.single = before


def _taking_one(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take the place of `F.batch_norm`, on the threads that want it."""

    def batch_norm(x: Tensor, *given: Any, **named: Any) -> Tensor:
        if not getattr(_here, "single", False):
            return plain(x, *given, **named)
        called = _signature.bind(x, *given, **named)
        called.apply_defaults()
        _, _, _, weight, bias, training, momentum, eps = called.args
        if training:
            would_meet()
        if not training or x.numel() != x.shape[1]:
            return plain(x, *given, **named)
        # What F.batch_norm comes to when it does not refuse a single value.
        return torch.batch_norm(x, weight, bias, None, None, True, momentum, eps, torch.backends.cudnn.enabled)  # noqa: FBT003

    return batch_norm


_here = threading.local()
_signature = inspect.signature(F.batch_norm)
_swap = Swap(F, "batch_norm", _taking_one)


def awake_norms(models: Sequence[nn.Module]) -> list[str]:
    """Name the BatchNorm layers that normalise by the batch."""
    return [name for name, module in arguments.batch_norms(models) if arguments.is_awake(module)]


def coupled_notes(
    models: Sequence[nn.Module], found: Plan, *, inside: bool, waiting: Waiting | None
) -> tuple[str, ...]:
    """Say where activations wait while micro-batches run in lock-step, and whether there is room.

    `inside`: models ask for other samples between their layers.
    """
    awake = awake_norms(models)
    if not (awake or inside) or found.size is None:
        return ()
    said = "This model asks for other samples between its layers (across):"
    if awake:
        said = f"BatchNorm ('{awake[0]}'{' and others' if len(awake) > 1 else ''}) couples the samples:"
    if found.steps == 1:
        said += " BigStep takes all at once where that fits, and otherwise runs micro-batches in lock-step;"
        return (f"{said} an Accumulator refuses it.",)
    said += " micro-batches run in lock-step, and the activations of the whole batch"
    if waiting is None:
        return (f"{said} wait on the device or in host memory.",)
    there = host_available()
    room = f"of {human(there)} that are free"
    if waiting.whole > there:
        room = "more than is free: a step would be refused"
    chosen = next((row for row in found.rows if row.size == found.size), None)
    if chosen is None or chosen.waiting_bytes is None:
        return (f"{said}, about {human(waiting.whole)}, wait in this process's memory, beside these peaks, {room}.",)
    beside = (
        f"Peaks are of a micro-batch alone: beside one of {found.size:,} wait about {human(chosen.waiting_bytes)} on "
        "the device, the samples of all, tensors too small to move and what others hold where they meet; "
        f"{human((found.peak_bytes or 0) + chosen.waiting_bytes)} in all"
    )
    return (
        f"{said}, about {human(waiting.whole)}, wait in host memory where the device has no room, {room}.",
        f"{beside}{'' if chosen.fits else ', more than there is to use: take a smaller batch'}.",
    )

"""What every rank must have alike, or each would make a step of its own: in words, and in numbers to compare."""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from bigbatch.distributed.fsdp_internals import local
from bigbatch.loss.count import LOW_PRECISION

_HOW = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "initial_lr"}
)  # not what is computed


def of_optimizers(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return what a step depends on, by names that are the same on every rank."""
    groups: list[dict[str, Any]] = [group for each in optimizers for group in each.param_groups]
    rest = [{name: value for name, value in group.items() if name not in _HOW} for group in groups]
    return {
        "optimizer": " and ".join(f"{type(each).__name__} of {len(each.param_groups)} groups" for each in optimizers),
        "lr": ", ".join(in_words(group["lr"]) for group in groups if "lr" in group),
        "weight_decay": ", ".join(in_words(group.pop("weight_decay", None)) for group in rest),
        "options of the optimizer": "; ".join(_options(group) for group in rest),
        # What it holds may be each rank's own, as that of ZeroRedundancyOptimizer is.
        "state of the optimizer": "some" if any(each.state for each in optimizers) else "none",
    }


def of_scaler(scaler: GradScaler | None) -> str:
    """Return what a loss scale is and will be; this waits for a device that has it."""
    known = {} if scaler is None else scaler.state_dict()  # nothing of one that is not enabled
    return ", ".join(f"{name} {in_words(value)}" for name, value in known.items()) or "None"


def rates_in_one(optimizers: Sequence[Optimizer]) -> float:
    """Return one number of the learning rates, without waiting for a device that has any."""
    every = [group["lr"] for each in optimizers for group in each.param_groups if "lr" in group]
    return sum(place * float(rate) for place, rate in enumerate(every, 1) if _is_here(rate))


def parameters_in_one(every: Sequence[Tensor]) -> float:
    """Return one number of which parameters are trained, by their places in the optimizers and their sizes."""
    return float(zlib.crc32(array("q", [p.numel() if p.requires_grad else -1 for p in every]).tobytes()))


def weights_in_one(parameters: Sequence[Tensor], device: torch.device) -> float:
    """Return one number of all parameters' values, by which other ones are known; this waits for a device.

    Each counts by its place, so that another order is known, too. bf16 would round the sums of other weights to the
    same, and fp16 has none so large.
    """
    norms = [
        torch.linalg.vector_norm(local(p.detach()), 1, dtype=torch.float32 if p.dtype in LOW_PRECISION else None)
        for p in parameters
    ]
    sums: list[float] = torch.stack([each.to(device, torch.float32) for each in norms]).tolist()
    return sum(place * each for place, each in enumerate(sums, 1))


def in_words(value: object) -> str:
    """Return a setting in words; numbers without the digits in which machines may round differently."""
    if isinstance(value, Tensor):
        return in_words(float(value)) if _is_here(value) else "on the device"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(in_words, value))})"
    return str(value) if value is None or isinstance(value, bool | int | str) else type(value).__name__


def _options(group: Mapping[str, Any]) -> str:
    """Return what else a group of parameters was given; a scheduler may have left its own beside it."""
    return ", ".join(f"{name}={in_words(value)}" for name, value in sorted(group.items()) if name != "lr")


def _is_here(value: object) -> bool:
    """Whether a number can be read at once."""
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
    )

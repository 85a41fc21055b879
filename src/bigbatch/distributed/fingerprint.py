"""What every rank must have set alike, or each would make a step of its own: in words, and in numbers to compare."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from bigbatch.window.stepper import Stepper

_HOW = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "initial_lr"}
)  # not what is computed


def settings(stepper: Stepper, gradient_dtype: torch.dtype | None) -> dict[str, str]:
    """Return what a step depends on, by names that are the same on every rank."""
    optimizers = stepper.optimizers
    groups: list[dict[str, Any]] = [group for each in optimizers for group in each.param_groups]
    rest = [{name: value for name, value in group.items() if name not in _HOW} for group in groups]
    return {
        "optimizer": " and ".join(f"{type(each).__name__} of {len(each.param_groups)} groups" for each in optimizers),
        "scheduler": " and ".join(type(each).__name__ for each in stepper.schedulers) or "None",
        "scaler": _scaler(stepper.scaler),
        "clip_norm": _text(stepper.clip_norm),
        "skip_nonfinite": str(stepper.skip_nonfinite),
        "gradient_dtype": str(gradient_dtype),
        "lr": rates(optimizers),
        "weight_decay": ", ".join(_text(group.pop("weight_decay", None)) for group in rest),
        "options of the optimizer": "; ".join(_options(group) for group in rest),
        # What it holds may be each rank's own, as that of ZeroRedundancyOptimizer is.
        "state of the optimizer": "some" if any(each.state for each in optimizers) else "none",
    }


def rates(optimizers: Sequence[Optimizer]) -> str:
    """Return the learning rates, one after the other."""
    return ", ".join(_text(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group)


def rates_in_one(optimizers: Sequence[Optimizer]) -> float:
    """Return one number of the learning rates, without waiting for a device that has any."""
    every = [group["lr"] for each in optimizers for group in each.param_groups if "lr" in group]
    return sum(place * float(rate) for place, rate in enumerate(every, 1) if _is_here(rate))


def _scaler(scaler: GradScaler | None) -> str:
    """Return what a loss scale is and will be; this waits for a device that has it."""
    known = {} if scaler is None else scaler.state_dict()  # nothing of one that is not enabled
    return ", ".join(f"{name} {_text(value)}" for name, value in known.items()) or "None"


def _options(group: Mapping[str, Any]) -> str:
    """Return what else a group of parameters was given; a scheduler may have left its own beside it."""
    return ", ".join(f"{name}={_text(value)}" for name, value in sorted(group.items()) if name != "lr")


def _text(value: object) -> str:
    """Return a setting in words; numbers without the digits in which machines may round differently."""
    if isinstance(value, Tensor):
        return _text(float(value)) if _is_here(value) else "on the device"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return str(value) if value is None or isinstance(value, bool | int | str) else type(value).__name__


def _is_here(value: object) -> bool:
    """Whether a number can be read at once."""
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
    )

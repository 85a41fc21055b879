"""What a failure must leave as it was: numbers, hooks, modes, threads and patched functions."""

import gc
import os
import random
import signal
import sys
import threading
import warnings
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from tests.faults.programs import Program

_PATCHABLE: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.nn.Module,
    torch.nn.Linear,
    torch.nn.BatchNorm1d,
    torch.nn.modules.batchnorm,
    torch.nn.modules.batchnorm._BatchNorm,
    torch.autograd,
    torch.autograd.graph,
    torch.optim.Optimizer,
    torch.utils.checkpoint,
    torch.random,
    torch.distributed,
    random,
    np.random,
    threading,
)
_FLOOR = 1e-2  # below this norm a number may be the rounding of larger ones that cancel
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks")


def numbers(  # noqa: C901 - one loop for each kind
    program: Program, *, buffers: bool = True, gradients: bool = True
) -> dict[str, Any]:
    """Return every number that a step may change."""
    found: dict[str, Any] = {}
    for i, model in enumerate(program.models):
        for name, p in model.named_parameters():
            found[f"parameter {i}.{name}"] = p.detach().clone()
            if gradients:
                found[f"gradient {i}.{name}"] = None if p.grad is None else p.grad.detach().clone()
        if buffers:
            for name, buffer in model.named_buffers():
                found[f"buffer {i}.{name}"] = buffer.clone()
    for i, optimizer in enumerate(program.optimizers):
        for j, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for name, value in sorted(optimizer.state.get(p, {}).items()):
                kept = value.clone() if isinstance(value, Tensor) else value
                found[f"optimizer state {i}.{j}.{name}"] = kept
        found[f"learning rate {i}"] = [float(group["lr"]) for group in optimizer.param_groups]
    for i, scheduler in enumerate(program.schedulers):
        found[f"scheduler {i}"] = scheduler.last_epoch
    if program.scaler is not None:
        found["scaler"] = sorted(program.scaler.state_dict().items())
    return found


def randomness() -> dict[str, Any]:
    """Return the states of all default generators."""
    kept: Any = np.random.get_state()  # noqa: NPY002 - the one that is restored
    return {
        "random numbers of torch": torch.get_rng_state(),
        "random numbers of Python": random.getstate(),
        "random numbers of numpy": (kept[1].tobytes(), kept[2:]),
    }


def differing(now: dict[str, Any], then: dict[str, Any], tolerance: float | None = None) -> list[str]:
    """Name what differs, bit by bit or by more than a relative tolerance."""
    names = [f"{name} (is new or gone)" for name in sorted(now.keys() ^ then.keys())]
    for name in sorted(now.keys() & then.keys()):
        a, b = now[name], then[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
            if torch.equal(a, b):
                continue
            off = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(_FLOOR))
            if tolerance is None or not off <= tolerance:
                names.append(f"{name} off by {off:.1e}")
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
            names.append(name if len(f"{a} {b}") > 60 else f"{name} {b} -> {a}")
    return names


def surroundings(program: Program | None = None) -> dict[str, Any]:
    """Return what nobody sees until it is wrong: hooks, attributes, modes, patched functions."""
    found: dict[str, Any] = {
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "garbage collection": gc.isenabled(),
        "signal handler": signal.getsignal(signal.SIGINT),
        "excepthook": sys.excepthook,
        "thread excepthook": threading.excepthook,
        "processors": os.sched_getaffinity(0),
        "switch interval": sys.getswitchinterval(),
        "warnings": len(warnings.filters),
    }
    for place in _PATCHABLE:
        for name, value in list(vars(place).items()):
            if isinstance(value, FunctionType) or (callable(value) and not isinstance(value, type | ModuleType)):
                found[f"{getattr(place, '__name__', place)}.{name}"] = id(value)
    if program is not None:
        found |= _hooks(program)
    return found


def _hooks(program: Program) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, model in enumerate(program.models):
        for name, module in model.named_modules():
            found[f"module {i}.{name}"] = (type(module), sorted(vars(module)), module.training)
            found[f"hooks of module {i}.{name}"] = [len(getattr(module, hooks, ())) for hooks in _HOOKS]
        for name, p in model.named_parameters():
            own = (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ()))
            found[f"hooks of parameter {i}.{name}"] = (*own, sorted(vars(p)), getattr(p, "grad_dtype", None))
    for i, optimizer in enumerate(program.optimizers):
        found[f"hooks of optimizer {i}"] = [len(getattr(optimizer, hooks, ())) for hooks in _OPTIMIZER_HOOKS]
        found[f"attributes of optimizer {i}"] = sorted(vars(optimizer))
    return found


def patched(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Name what is no longer as it was; functions that an import has added since are none of it."""
    return [name for name in then if now.get(name, "gone") != then[name]]


def copied(batch: Any) -> Any:
    """Return a batch in tensors of its own."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def workers() -> list[threading.Thread]:
    """Return the threads of bigbatch that run."""
    return [thread for thread in threading.enumerate() if "bigbatch" in thread.name]

"""What a failure must leave as it was: numbers, hooks, modes, threads and patched functions."""

import gc
import os
import random
import signal
import sys
import threading
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C import _autograd as native
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

from tests.faults.programs import Program

_PATCHABLE: tuple[Any, ...] = (
    torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.nn.Linear, torch.nn.BatchNorm1d,
    torch.nn.modules.batchnorm, torch.nn.BatchNorm1d.__base__, torch.autograd, torch.autograd.graph,
    torch.optim.Optimizer, torch.utils.checkpoint, torch.random, torch.distributed, random, np.random, threading,
)  # fmt: skip
_FLOOR = 1e-2  # below this norm a number may be the rounding of larger ones that cancel


def copied(tree: Any) -> Any:
    """Return it in tensors of its own."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def numbers(program: Program, *, buffers: bool = True, gradients: bool = True) -> dict[str, Any]:
    """Return every number that a step may change."""
    found: dict[str, Any] = {
        "learning rate": [[float(group["lr"]) for group in o.param_groups] for o in program.optimizers],
        "scheduler": [scheduler.last_epoch for scheduler in program.schedulers],
        "scaler": None if program.scaler is None else program.scaler.state_dict(),
    }
    for i, model in enumerate(program.models):
        found[f"parameter {i}"] = dict(model.named_parameters())
        if gradients:
            found[f"gradient {i}"] = {name: p.grad for name, p in model.named_parameters()}
        if buffers:
            found[f"buffer {i}"] = dict(model.named_buffers())
    for i, optimizer in enumerate(program.optimizers):
        found[f"optimizer state {i}"] = optimizer.state_dict()["state"]
    return {pytree.keystr(path): copied(leaf) for path, leaf in pytree.tree_leaves_with_path(found)}


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
        "dispatch modes": len(dispatch._get_current_dispatch_mode_stack()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "saved tensors hooks": native._top_saved_tensors_default_hooks(True),
        "garbage collection": gc.isenabled(),
        "signal handler": signal.getsignal(signal.SIGINT),
        "excepthooks": (sys.excepthook, threading.excepthook),
        "processors": os.sched_getaffinity(0),
        "switch interval": sys.getswitchinterval(),
        "warnings": len(warnings.filters),
    }
    for place in _PATCHABLE:
        for name, value in list(vars(place).items()):
            if callable(value) and not isinstance(value, type | ModuleType):
                found[f"{getattr(place, '__name__', place)}.{name}"] = id(value)
    for i, model in enumerate(() if program is None else program.models):
        for name, part in [*model.named_modules(), *model.named_parameters()]:
            kept = (type(part), getattr(part, "training", None), getattr(part, "grad_dtype", None))
            found[f"model {i} {name}"] = (*kept, _attributes(part))
    for i, optimizer in enumerate(() if program is None else program.optimizers):
        found[f"optimizer {i}"] = _attributes(optimizer)
    return found


def _attributes(thing: Any) -> list[str]:
    """Return the names of its attributes, with how many hooks it has of each kind."""
    names = [*vars(thing), *(("_backward_hooks", "_post_accumulate_grad_hooks") if isinstance(thing, Tensor) else ())]
    return sorted(f"{name} {len(getattr(thing, name) or ()) if 'hooks' in name else ''}" for name in names)


def patched(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Name what is no longer as it was; functions that an import has added since are none of it."""
    return [name for name in then if now.get(name, "gone") != then[name]]

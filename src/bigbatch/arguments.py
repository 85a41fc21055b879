"""Checks of what users pass: each returns what it has checked, or raises at once."""

from collections.abc import Callable, Sequence
from inspect import signature
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bigbatch.errors import ConfigurationError, LossError

_WRAPPERS = frozenset("accelerate lightning lightning_fabric pytorch_lightning".split())


def _refuse(name: str, what: str, found: object) -> ConfigurationError:
    return ConfigurationError(f"{name} must be {what}; found {found}")


def models(model: object, *, ranks: bool = False) -> tuple[nn.Module, ...]:
    """Accept one module or several; `ranks` where replicas on several ranks will do."""
    found: tuple[nn.Module, ...] = _one_or_several("model", model, nn.Module, "an nn.Module")
    for module in () if ranks else found:
        in_shards = any(kind.__name__ == "FSDPModule" for each in module.modules() for kind in type(each).__mro__)
        if in_shards or (isinstance(module, DistributedDataParallel) and module.process_group.size() > 1):
            raise ConfigurationError(
                f"{type(module).__name__} spreads a model over several ranks, and this runs in one process.",
                fix=f"the model as it is before {'fully_shard is called' if in_shards else 'it is wrapped'}, in a "
                "process of its own; to train on several devices, start from examples/ranks/ddp.py",
            )
    return found


def _one_or_several(name: str, given: object, kind: type, written: str) -> tuple[Any, ...]:
    every = given if isinstance(given, list | tuple) else (given,)
    found = tuple(every if kind is nn.Module else (_unprepared(each, name) for each in every))
    wrong = [type(each).__name__ for each in found if not isinstance(each, kind)]
    if wrong or not found:
        raise _refuse(name, f"{written} or a sequence of them", wrong[0] if wrong else "an empty sequence")
    return found


def _unprepared(found: Any, inner: str) -> Any:
    """Return an optimizer or a scheduler that Accelerate or Lightning has wrapped, by their documented attribute."""
    while any(kind.__module__.partition(".")[0] in _WRAPPERS for kind in type(found).__mro__):
        found = getattr(found, inner)
    return found


def optimizers(optimizer: object, modules: Sequence[nn.Module]) -> tuple[Optimizer, ...]:
    """Accept one optimizer or several, each with parameters of the models."""
    found: tuple[Optimizer, ...] = _one_or_several("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    theirs = {id(p) for module in modules for p in module.parameters()}
    seen: set[int] = set()
    for each in found:
        name = type(each).__name__
        if isinstance(each, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates the loss several times within one step, through a closure, so there is no window to "
                "accumulate.",
                fix="a first-order optimizer such as torch.optim.AdamW",
            )
        mine = {id(p) for group in each.param_groups for p in group["params"]}
        if not mine & theirs:
            raise ConfigurationError(
                f"{name} shares no parameter with the model. (A model moved, sharded or re-created after its optimizer "
                "was made has other parameters.)",
                fix=f"{name}(model.parameters(), ...)",
            )
        if mine & seen:
            raise ConfigurationError(
                f"{len(mine & seen)} parameters belong to two optimizers; each may be stepped by one"
            )
        seen |= mine
    return found


def positive(name: str, number: Any, what: str = "") -> int:
    """Accept a positive integer, of numpy or not; `what` goes on from there."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise _refuse(name, f"a positive integer{what}", repr(number))
    return int(number)


def steps(number: object) -> int:
    """Accept a positive integer."""
    return positive("steps", number, ", the number of micro-batches per update")


def size(name: str, number: Any) -> int | Literal["auto"]:
    """Accept a positive integer, or "auto"."""
    return "auto" if isinstance(number, str) and number == "auto" else positive(name, number, ' or "auto"')


def one_of(name: str, value: object, *words: str) -> None:
    """Accept one of some words."""
    if value not in words:
        raise _refuse(name, " or ".join(f'"{word}"' for word in words), repr(value))


def loader(found: object) -> None:
    """Refuse what cannot be iterated over, before the loop begins."""
    if not hasattr(found, "__iter__") and not hasattr(found, "__getitem__"):
        raise ConfigurationError(
            f"over takes the loader, anything that yields micro-batches; found {type(found).__name__}",
            fix="for inputs, labels in accumulator.over(loader)",
        )


def mesh(given: object) -> None:
    """Refuse an argument that is gone."""
    if given is not None:
        raise ConfigurationError(
            "mesh= is gone, and tensor parallelism with it.",
            fix="DistributedDataParallel or fully_shard without it; else say which processes have samples of their "
            "own:  group=mesh.get_group()",
        )


def takes(function: Any, number: int) -> bool:
    """Whether a function can be called with so many arguments; True where Python cannot tell."""
    try:
        signature(function).bind(*range(number))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # some built-in functions have no signature
    return True


def _is_norm(norm: object) -> bool:
    return isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0


# What may be passed under a name beside None, in words and as a function.
_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "clip_norm": ("a positive number (math.inf only reports the norm) or None", _is_norm),
    "gradient_dtype": (
        "torch.float32, torch.float64 or None (the parameter's own)",
        lambda dtype: dtype in (torch.float32, torch.float64),
    ),
    "counts": ("a function from a batch to its counts, one per term of the loss", callable),
    "scaler": ("a torch.amp.GradScaler", lambda found: isinstance(found, GradScaler)),
    "lengths": ("the name of a mask or a function from a batch", lambda x: isinstance(x, str) or callable(x)),
    "collate": ("a function from a list of samples to a batch", callable),
    "evaluate": ("a function of the model", lambda f: callable(f) and takes(f, 1)),
}


def optional(**given: Any) -> None:
    """Accept None, and what their names say."""
    for name, value in given.items():
        what, accepts = _ACCEPTED[name]
        if value is not None and not accepts(value):
            raise _refuse(name, what, repr(value))


def truths(**given: object) -> None:
    """Accept True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise _refuse(name, "True or False", repr(value))


def schedulers(scheduler: object, known: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    """Accept schedulers that step without an argument."""
    if scheduler is None or scheduler in ([], ()):
        return ()
    kind = "a torch.optim.lr_scheduler.LRScheduler"
    found: tuple[LRScheduler, ...] = _one_or_several("scheduler", scheduler, LRScheduler, kind)
    for each in found:
        if isinstance(each, ReduceLROnPlateau):
            raise ConfigurationError(
                "ReduceLROnPlateau steps on a validation metric, which an update does not have.",
                fix="scheduler.step(validation_loss) after each validation, and no scheduler=",
            )
        if not any(_unprepared(each.optimizer, "optimizer") is o for o in known):
            raise ConfigurationError(f"{type(each).__name__} schedules an optimizer that was not given")
    return found


def loss(value: object) -> None:
    """Refuse what backward could not use, before anything is touched."""
    if type(value) is Tensor and value.requires_grad and not value.dim() and value.is_floating_point():
        return
    if not isinstance(value, Tensor):
        fix = "the loss before .item(), which has a graph" if isinstance(value, int | float) else ""
        fix = "outputs.loss" if hasattr(value, "loss") else fix
        raise LossError(f"the loss must be a tensor; found {type(value).__name__}", fix=fix)
    if value.numel() != 1:
        raise LossError(
            f"the loss must be one number, a mean or a sum; found a tensor of shape {tuple(value.shape)}",
            fix="loss.mean(), or criterion(..., reduction='mean')",
        )
    if value.is_complex():
        raise LossError(f"the loss must be real; found {value.dtype}", fix="loss.real or loss.abs()")
    if not value.requires_grad:
        raise LossError(
            "this loss has no graph: it was computed under torch.no_grad(), detached, or from frozen parameters.",
            fix="the model's output with gradients on",
        )

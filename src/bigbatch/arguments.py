"""Misuse, caught at its first occurrence: what was found and what to type instead."""

import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bigbatch.caller import outside
from bigbatch.distributed.fsdp_internals import sharded
from bigbatch.errors import BatchNormError, ConfigurationError, LossError
from bigbatch.loss.graph import edges, is_leaf, operation, saved, saved_number, saved_tensor, shape, unseen, variable
from bigbatch.loss.terms import Term

_BETWEEN_TERMS = frozenset("Add Sub Rsub Mul Div Neg ToCopy View Squeeze Sum Mean Stack".split())
_TERMS_LOOKED_AT = 64
_WRAPPERS = frozenset("accelerate lightning lightning_fabric pytorch_lightning".split())
_NODES_LOOKED_AT = 96
_KNOWN_HOOKS = ("bigbatch.", "torch.distributed.", "wandb.")  # they add nothing, or reduce
_BATCH_NORMS = frozenset("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm SyncBatchNormFunction".split())


def models(model: object, *, ranks: bool = False) -> tuple[nn.Module, ...]:
    """Accept one module or several; `ranks` where replicas on several ranks will do."""
    found = tuple(model) if isinstance(model, list | tuple) else (model,)
    for module in found:
        if isinstance(module, Optimizer):
            msg = (
                f"model must be an nn.Module or a sequence of them; found {type(module).__name__}, an optimizer.\n"
                "Put them the other way round:  Accumulator(model, optimizer, steps=...)"
            )
            raise ConfigurationError(msg)
        if not isinstance(module, nn.Module):
            msg = f"model must be an nn.Module or a sequence of them; found {type(module).__name__}"
            raise ConfigurationError(msg)
    if not found:
        msg = "model is an empty sequence; pass at least one nn.Module"
        raise ConfigurationError(msg)
    for module in found:
        _refuse_ranks(module, replicas=not ranks)
    return found


def mesh(given: object) -> None:
    """Refuse an argument that is gone."""
    if given is not None:
        msg = (
            "mesh= is gone, and tensor parallelism with it.\n"
            "Leave it out where the model is in DistributedDataParallel or fully_shard; else say which processes have "
            "samples of their own:  group=mesh.get_group()"
        )
        raise ConfigurationError(msg)


def _refuse_ranks(module: nn.Module, *, replicas: bool) -> None:
    """Gradients that ranks reduce cannot be compared with those of one process."""
    in_shards = replicas and bool(sharded([module]))
    several = isinstance(module, DistributedDataParallel) and module.process_group.size() > 1
    if in_shards or (several and replicas):
        how = "before fully_shard is called" if in_shards else "before it is wrapped"
        msg = (
            f"{type(module).__name__} spreads a model over several ranks, and verify compares gradients within one "
            "process.\n"
            f"Give the model as it is {how}, in a process of its own."
        )
        raise ConfigurationError(msg)


def overlap(wanted: object) -> bool:
    """Accept a truth value."""
    if isinstance(wanted, bool):
        return wanted
    msg = f"overlap must be True or False; found {wanted!r}"
    raise ConfigurationError(msg)


def _unprepared(found: Any, inner: Literal["optimizer", "scheduler"]) -> Any:
    """Return what Accelerate and Lightning have wrapped, by their documented attribute."""
    while any(kind.__module__.partition(".")[0] in _WRAPPERS for kind in type(found).__mro__):
        found = getattr(found, inner)
    return found


def optimizers(optimizer: object, modules: Sequence[nn.Module]) -> tuple[Optimizer, ...]:
    """Accept one optimizer or several, each with parameters of the models."""
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    found = tuple(_unprepared(each, "optimizer") for each in given)
    theirs = {id(p) for module in modules for p in module.parameters()}
    seen: set[int] = set()
    if not found:
        msg = "optimizer is an empty sequence; pass at least one torch.optim.Optimizer"
        raise ConfigurationError(msg)
    for each in found:
        if not isinstance(each, Optimizer):
            msg = f"optimizer must be a torch.optim.Optimizer or a sequence of them; found {type(each).__name__}"
            raise ConfigurationError(msg)
        name = type(each).__name__
        if isinstance(each, LBFGS):
            msg = (
                "LBFGS evaluates the loss several times within one step, through a closure, so there is no window to "
                "accumulate.\nUse a first-order optimizer such as torch.optim.AdamW."
            )
            raise ConfigurationError(msg)
        mine = {id(p) for group in each.param_groups for p in group["params"]}
        if not mine & theirs:
            msg = (
                f"{name} shares no parameter with the model: it holds {len(mine)} tensors, none of them among the "
                f"model's {len(theirs)}.\nMake it from this model:  {name}(model.parameters(), ...). (A model moved, "
                "sharded or re-created after its optimizer was made has other parameters.)"
            )
            raise ConfigurationError(msg)
        if mine & seen:
            msg = f"{len(mine & seen)} parameters belong to two optimizers; each may be stepped by one"
            raise ConfigurationError(msg)
        seen |= mine
    return found


def steps(number: object) -> int:
    """Accept a positive integer."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        hint = ", a float: divide with //, as in steps=64 // 16" if isinstance(number, float) else ""
        msg = f"steps must be a positive integer, the number of micro-batches per update; found {number!r}{hint}"
        raise ConfigurationError(msg)
    return int(number)  # numpy's are Integral, too


def loader(found: object) -> None:
    """Refuse what cannot be iterated over, before the loop begins."""
    if not hasattr(found, "__iter__") and not hasattr(found, "__getitem__"):
        call = "\nThis one makes a loader, perhaps: call it:  accumulator.over(loader())" if callable(found) else ""
        msg = (
            f"over takes the loader, anything that yields micro-batches; found {type(found).__name__}.\n"
            f"Write:  for inputs, labels in accumulator.over(loader):{call}"
        )
        raise ConfigurationError(msg)


def clip_norm(norm: object) -> float | None:
    """Accept a positive norm or none."""
    if norm is None:
        return None
    if isinstance(norm, bool) or not isinstance(norm, int | float) or math.isnan(norm) or norm <= 0:
        msg = f"clip_norm must be a positive number (math.inf only reports the norm) or None; found {norm!r}"
        raise ConfigurationError(msg)
    return float(norm)


def gradient_dtype(dtype: object) -> torch.dtype | None:
    """Accept what low-precision gradients may be added up in."""
    if dtype is None or dtype in (torch.float32, torch.float64):
        return dtype
    msg = f"gradient_dtype must be torch.float32, torch.float64 or None (the parameter's own); found {dtype!r}"
    raise ConfigurationError(msg)


def batch_norm(mode: object) -> Literal["refuse", "micro"]:
    """Accept one of the two modes."""
    if mode == "refuse" or mode == "micro":  # noqa: PLR1714 - merged, the type checker would not see the two words
        return mode
    msg = f'batch_norm must be "refuse" or "micro"; found {mode!r}'
    raise ConfigurationError(msg)


def skip_nonfinite(skip: object) -> bool:
    """Accept a truth value."""
    if isinstance(skip, bool):
        return skip
    msg = f"skip_nonfinite must be True or False; found {skip!r}"
    raise ConfigurationError(msg)


def counts(function: object) -> Callable[[Any], Any] | None:
    """Accept a function of a batch."""
    if function is None or callable(function):
        return function
    msg = f"counts must be a function from a batch to its counts, one per term of the loss; found {function!r}"
    raise ConfigurationError(msg)


def scaler(found: object) -> GradScaler | None:
    """Accept a gradient scaler."""
    if found is None or isinstance(found, GradScaler):
        return found
    msg = f"scaler must be a torch.amp.GradScaler; found {type(found).__name__}"
    raise ConfigurationError(msg)


def schedulers(scheduler: object, known: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    """Accept schedulers that step without an argument."""
    given = () if scheduler is None else tuple(scheduler) if isinstance(scheduler, list | tuple) else (scheduler,)
    found = tuple(_unprepared(each, "scheduler") for each in given)
    for each in found:
        if isinstance(each, ReduceLROnPlateau):
            msg = (
                "ReduceLROnPlateau steps on a validation metric, which an update does not have.\n"
                "Keep it out and call it yourself after each validation:  scheduler.step(validation_loss)"
            )
            raise ConfigurationError(msg)
        if not isinstance(each, LRScheduler):
            msg = f"scheduler must be a torch.optim.lr_scheduler.LRScheduler or a sequence; found {type(each).__name__}"
            raise ConfigurationError(msg)
        if not any(_unprepared(each.optimizer, "optimizer") is o for o in known):
            msg = f"{type(each).__name__} schedules an optimizer that was not given to this accumulator"
            raise ConfigurationError(msg)
    return found


def loss(value: object, grad_scaler: GradScaler | None) -> None:
    """Refuse what backward could not use, before anything is touched."""
    if not isinstance(value, Tensor):
        inner = (
            ".loss" if hasattr(value, "loss") else "['loss']" if isinstance(value, Mapping) and "loss" in value else ""
        )
        hint = ".\nLeave out .item(): a number has no graph" if isinstance(value, int | float) else ""
        hint = f".\nPass its loss:  outputs{inner}" if inner else hint
        msg = f"backward takes the loss, a tensor; found {type(value).__name__}{hint}"
        raise LossError(msg)
    if value.numel() != 1:
        msg = (
            f"backward takes one number, a mean or a sum; found a tensor of shape {tuple(value.shape)}.\n"
            "Reduce it:  loss.mean(), or criterion(..., reduction='mean')"
        )
        raise LossError(msg)
    if value.is_complex():
        msg = f"backward takes a real loss; found {value.dtype}. Take loss.real or loss.abs()"
        raise LossError(msg)
    if not value.requires_grad:
        msg = (
            "this loss has no graph: it was computed under torch.no_grad(), detached, or from frozen parameters.\n"
            "Compute it from the model's output with gradients on."
        )
        raise LossError(msg)
    if grad_scaler is not None and _is_scaled(value, grad_scaler):
        msg = (
            "this loss has already been through scaler.scale(): it would be scaled twice.\n"
            "Pass it as it is:  accumulator.backward(loss)"
        )
        raise LossError(msg)


def _is_scaled(value: Tensor, grad_scaler: GradScaler) -> bool:
    """Look for the scaler's own tensor among the factors of the loss and of its terms."""
    scale = getattr(grad_scaler, "_scale", None)
    stack, looked = [value.grad_fn], 0
    while stack and scale is not None and looked < _TERMS_LOOKED_AT:
        node = stack.pop()
        if node is None or operation(node) not in _BETWEEN_TERMS:
            continue
        looked += 1
        factors = (saved_tensor(node, "other"), saved_tensor(node, "self")) if operation(node) == "Mul" else ()
        if any(factor is not None and factor.data_ptr() == scale.data_ptr() for factor in factors):
            return True
        stack.extend(below for below, _ in edges(node))
    return False


def looks_divided(value: Tensor, terms: Sequence[Term], number: int) -> bool:
    """Tell whether the last thing done to the loss was to divide it by a number, `loss / steps`.

    A factor of one over it, `0.5 * loss`, is a weight; and so is the mean of as many terms, or a sum over as many rows.
    """
    node = value.grad_fn
    if node is None or number == 1 or operation(node) != "Div":
        return False
    if len(terms) == number or any(term.divided for term in terms):
        return False
    with unseen():
        return saved_number(node, "other") == number


def divided_message(value: Tensor, terms: Sequence[Term], number: int, ranks: int = 1) -> str | None:
    """Say what a loss divided by `steps`, the number of ranks or both comes to; None of any other."""
    each = {"steps": number, "the number of ranks": ranks, "steps times the number of ranks": number * ranks}
    known = {name: divisor for name, divisor in each.items() if looks_divided(value, terms, divisor)}
    if not known:
        return None
    found = next(iter(known.values()))
    named = [name for name in known if "times" not in name] or list(known)  # one of them may be 1
    how = "hand-written accumulation" if named == ["steps"] else "a training loop for several processes"
    return (
        f"this loss looks divided by {' or '.join(named)} ({found}) already, as {how} does; bigbatch averages by "
        f"itself{' over all ranks' if ranks > 1 else ''}, so its gradients would be {found} times too small. Pass the "
        f"undivided loss. If you mean it, say it as a factor:  accumulator.backward(loss * {1 / found:g})"
    )


def batch_norms(modules: Sequence[nn.Module]) -> list[tuple[str, BatchNorm]]:
    """Return the BatchNorm layers of the models, by name."""
    return [(name, m) for model in modules for name, m in model.named_modules() if isinstance(m, BatchNorm)]


def spectral_norms(modules: Sequence[nn.Module]) -> list[str]:
    """Return the names of layers whose spectral norm moves by a power iteration whenever they run."""
    found: list[str] = []
    for name, module in (named for model in modules for named in model.named_modules()):
        hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - where the older one is
        if module.training and any(
            type(each).__name__ in {"_SpectralNorm", "SpectralNorm"} for each in (module, *hooks)
        ):
            found.append(name.partition(".parametrizations.")[0])
    return found


def warn_of_gradient_hooks(modules: Sequence[nn.Module], parameters: Iterable[Tensor]) -> None:
    """Say what a user's hook on a parameter's gradient does in a window, of the first that is found."""
    names = {id(p): name for model in modules for name, p in model.named_parameters()}
    for p in parameters:
        hooks = ChainMap(*(getattr(p, kind, None) or {} for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")))
        called = (getattr(each, "func", each) for each in hooks.values())  # what a functools.partial calls
        if any(not str(getattr(each, "__module__", "")).startswith(_KNOWN_HOOKS) for each in called):
            warnings.warn(
                f"parameter '{names.get(id(p), '')}' has a gradient hook: it runs on the gradient of each micro-batch, "
                "not on the big batch's. That is exact for a mask or a factor, and not for clipping or anything else "
                "that is not linear.\n"
                "To clip, use clip_norm=, or change the big batch's gradient in before_step(function).",
                stacklevel=outside(),
            )
            return


def is_awake(module: BatchNorm) -> bool:
    """Tell whether a BatchNorm normalises by the batch."""
    return module.training or module.running_mean is None


def refuse_compiled(models: Sequence[nn.Module]) -> None:
    """Refuse BatchNorm in training mode inside compiled code, where micro-batches cannot meet."""
    for model in models:
        for name, module in model.named_modules():
            compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None)
            if compiled and any(isinstance(m, BatchNorm) and is_awake(m) for m in module.modules()):
                msg = (
                    f"'{name or type(module).__name__}' is compiled and holds BatchNorm in training mode: inside "
                    "compiled code micro-batches cannot meet, and it would normalise by the micro-batch.\n"
                    "Give the model as it was before torch.compile, or freeze its BatchNorm (module.eval()), or accept "
                    'the difference:  Options(batch_norm="micro")'
                )
                raise BatchNormError(msg)


def batch_norms_rest(layers: Sequence[tuple[str, BatchNorm]], accepting: str) -> None:
    """Refuse BatchNorm in training mode: it would normalise by the micro-batch."""
    for name, module in layers:
        if is_awake(module):
            why = "is in training mode" if module.training else "keeps no running statistics"
            msg = (
                f"{type(module).__name__} '{name}' {why}: it normalises each micro-batch by its own mean "
                "and variance, not the big batch's, so the gradients differ, by 18 to 120 % where we measured.\n"
                "Either use BigStep, which normalises by the big batch, or freeze it (module.eval()), or use GroupNorm "
                "or LayerNorm, or accept the difference:\n"
                f"    {accepting}"
            )
            raise BatchNormError(msg)


def foreign_batch_norm(accepting: str) -> str:
    """Say that BatchNorm of a model that nobody told of normalises by the micro-batch."""
    return (
        "this loss went through BatchNorm in training mode, in a model that was not given to the accumulator: it "
        "normalises each micro-batch by its own mean and variance, not the big batch's.\n"
        "Put that model into evaluation mode (discriminator.eval()), or accept the difference:\n"
        f"    {accepting}"
    )


class Scan(NamedTuple):
    """What a whole graph holds."""

    reentrant_checkpoint: bool
    batch_norm: bool  # in training mode
    resting: frozenset[int] = frozenset()  # where running means of those in evaluation mode lie; 0: one cannot tell
    alone: bool = False  # it asked for other micro-batches where there were none
    leaves: Mapping[int, Tensor] = MappingProxyType({})  # the tensors that its gradient goes to, by their ids


def kind_of_graph(value: Tensor) -> int:
    """Tell graphs of different operations apart, whatever their sizes, by the part next to the loss."""
    found: dict[Node, None] = {} if value.grad_fn is None else {value.grad_fn: None}
    latest = list(found)
    while latest and len(found) < _NODES_LOOKED_AT:
        latest = [below for node in latest for below, _ in edges(node) if below is not None and below not in found]
        found.update(dict.fromkeys(latest))
    return hash(tuple(map(operation, found)))


def scan(value: Tensor) -> Scan:
    """Look through a whole graph."""
    stack, seen = [value.grad_fn], set[Node]()
    checkpoint = batch_norm_found = alone = False
    leaves, resting = dict[int, Tensor](), set[int]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = operation(node)
        checkpoint = checkpoint or name == "CheckpointFunction"
        alone = alone or name == "_Alone"
        if is_leaf(node):
            leaves[id(variable(node))] = variable(node)
        if name in _BATCH_NORMS:
            batch_norm_found = batch_norm_found or _normalises_by_batch(node)
            if not saved(node, "training"):
                mean = saved_tensor(node, "running_mean")
                resting.add(0 if mean is None else mean.data_ptr())
        stack.extend(below for below, _ in edges(node))
    return Scan(checkpoint, batch_norm_found, frozenset(resting), alone, leaves)


OTHERS_CHANGED = (
    "this loss runs through parameters that another optimizer trains, which has changed {} of them since the window's "
    "first micro-batch, as a discriminator's that steps before its generator: no big batch has such a gradient.\n"
    "Use: fake = generator(noise) once, then the generator's backward, then the discriminator's; or a BigStep each.\n"
    "accumulator.discard() drops this window."
)
SHARDED_SINCE = (
    "fully_shard was called on this model after the accumulator was made, and has put shards in the place of "
    "parameters that the optimizer holds: this loss reaches none of those.\n"
    "Make it after fully_shard:  fully_shard(model); optimizer = AdamW(model.parameters()); "
    "Accumulator(model, optimizer, ...)"
)
SHARDS_IN_A_LOSS = (
    "this loss uses parameters that fully_shard has sharded, beside the model's own forward: nothing adds up what "
    "ranks find for them there, so it would be a part of their gradient.\n"
    "Compute such a term inside the model's forward, where its parameters are whole; for a penalty on weights, give "
    "the optimizer weight_decay="
)
BESIDE_SHARDS = (
    "this loss uses a parameter of the optimizer that fully_shard has not sharded, outside of the model: nothing adds "
    "up what ranks find for it, so each would step it by itself.\n"
    "Make it a parameter of the model before fully_shard(model) is called:  "
    "self.scale = nn.Parameter(torch.ones(1)), and use it in the model's forward"
)


def _normalises_by_batch(node: Node) -> bool:
    """Instance norm is a batch norm of one batch, (1, samples x channels, ...): that is none."""
    return bool(saved(node, "training")) and shape(node)[0] > 1

"""What an experiment turns off in a copy of the model: random numbers, written state, statistics of a batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.verification.model_copy import ModelCopy

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_HELD = 0.5  # what stands for every number that is drawn
_MOVED = 0.1  # of a weight: how far away "elsewhere" is
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # arguments of kernels that drop

Off: TypeAlias = frozenset[str]  # what is turned off: kinds of causes, and
NOTHING: Off = frozenset()
OUTPUTS: Off = frozenset({"the model's outputs are detached: what is left comes from parameters alone"})
PLACE: Off = frozenset({"the weights are elsewhere"})


def turn_off(off: Off, model: ModelCopy) -> AbstractContextManager[Any]:
    """Turn it off in a copy for good."""
    with torch.no_grad():
        for p in model.parameters.values() if off & PLACE else ():
            p.mul_(1 + _MOVED * torch.arange(p.numel(), device=p.device).cos().reshape(p.shape).to(p.dtype))
    for each in model.models if off & OUTPUTS else ():
        each.register_forward_hook(lambda _module, _args, output: _copy(output))
    for module in dict.fromkeys(model.modules.values()):
        if "batch-norm" in off and isinstance(module, BatchNorm):
            module.register_forward_pre_hook(_rest, prepend=True)
        elif "state" in off and not isinstance(module, BatchNorm):
            module.register_forward_pre_hook(_restorer(module), prepend=True)
    if "randomness" not in off:
        return nullcontext()
    randomness = Randomness(devices_of(model.models))  # Python's and numpy's can only be repeated
    for each in model.models:
        each.register_forward_pre_hook(lambda *_: randomness.restore(), prepend=True)
    return Held()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _rest(norm: Any, inputs: Any) -> None:
    """Have BatchNorm use its running statistics, in each forward: a loop may turn training mode on."""
    norm.training = False
    if norm.running_mean is None:
        channels = inputs[0].shape[1]
        norm.running_mean, norm.running_var = inputs[0].new_zeros(channels), inputs[0].new_ones(channels)


class Held(TorchDispatchMode):
    """Makes every random number a constant, and has dropout drop nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        del types
        if func is torch.ops.aten.detach.default and not isinstance(args[0], Tensor):
            return torch.tensor(args[0])  # a number in a graph, which torch hands to a mode as it is
        arguments = func._schema.arguments  # noqa: SLF001 - an operation has no other signature
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= {**dict(zip((a.name for a in arguments), args, strict=False)), **(kwargs or {})}
        calm = {argument: value for argument, value in _CALM.items() if argument in given}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if calm and (draws or isinstance(given.get("dropout_p", given.get("dropout")), float)):
            return func(**{**given, **calm})
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found) if draws else ():
            if isinstance(each, Tensor):  # integers are 0
                is_order = func.overloadpacket is torch.ops.aten.randperm
                each.copy_(torch.arange(len(each), device=each.device)) if is_order else each.fill_(_HELD)
        return found


def state_of(module: nn.Module) -> dict[str, Any]:
    """Copy the buffers of one module, and the values that it keeps as plain attributes beside them."""
    plain = {name: value for name, value in vars(module).items() if name not in _OF_TORCH and _is_plain(value)}
    found: dict[str, Any] = _copy({**plain, **dict(module.named_buffers(recurse=False))})
    return found


def _is_plain(value: Any) -> bool:
    leaves = tree_leaves(value)
    return all(isinstance(x, int | float | str | Tensor | None) and not isinstance(x, nn.Parameter) for x in leaves)


def _copy(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _restorer(module: nn.Module) -> Callable[..., None]:
    """Return a hook that restores a module's own state, not a model's: in lock-step all begin before one ends."""
    kept = state_of(module)

    def restore(module: nn.Module, _: object) -> None:
        for name in state_of(module).keys() - kept.keys():
            delattr(module, name)
        for name, value in _copy(kept).items():
            (module._buffers if name in module._buffers else vars(module))[name] = value  # noqa: SLF001

    return restore

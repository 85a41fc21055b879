"""What an experiment turns off in a copy of the model: random numbers, written state, BatchNorm, coupled samples."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.verification.model_copy import ModelCopy

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_HELD = 0.5  # what stands for every number that is drawn
_MOVED = 0.1  # of a weight: how far away "elsewhere" is
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # arguments of kernels that drop
Dims = tuple[int | None, ...]  # of each leaf, the dimension along which its samples are


class Layout(NamedTuple):
    """Where the samples are in what a module takes and returns."""

    given: Dims
    output: Dims


# What is turned off: by one of these keys, or by the name of a module that then sees each micro-batch apart.
Off = Mapping[str, Layout | None]
RANDOMNESS = "every random number is a constant"
STATE = "every forward finds buffers and attributes as they were"
STATISTICS = "BatchNorm uses its running statistics"
OUTPUTS = "the model's outputs are detached: what is left comes from parameters alone"
PLACE = "the weights are elsewhere"
NOTHING: Off = {}


def without(off: Off, other: Off) -> Off:
    """Turn on again what the other turns off."""
    return {name: layout for name, layout in off.items() if name not in other}


def turn_off(off: Off, model: ModelCopy, sizes: Sequence[int]) -> AbstractContextManager[Any]:
    """Turn it off in a copy for good; `sizes` are the micro-batches of a big batch that runs whole."""
    with torch.no_grad():
        for p in model.parameters.values() if PLACE in off else ():
            p.mul_(1 + _MOVED * torch.arange(p.numel(), device=p.device).cos().reshape(p.shape).to(p.dtype))
    for each in model.models if OUTPUTS in off else ():
        each.register_forward_hook(lambda _module, _args, output: _copy(output))
    for module in dict.fromkeys(model.modules.values()):
        if STATISTICS in off and isinstance(module, BatchNorm):  # in each forward: a loop may turn training mode on
            module.register_forward_pre_hook(_evaluate, prepend=True)
        elif STATE in off and not isinstance(module, BatchNorm):
            module.register_forward_pre_hook(_restorer(module), prepend=True)
    for name, layout in off.items() if len(sizes) > 1 else ():
        if layout is not None:
            _split(model.modules[name], layout, sizes)
    if RANDOMNESS not in off:
        return nullcontext()
    randomness = Randomness(devices_of(model.models))  # Python's and numpy's can only be repeated
    for each in model.models:
        each.register_forward_pre_hook(lambda *_: randomness.restore(), prepend=True)
    return Draws(hold=True)


def _evaluate(module: nn.Module, _: object) -> None:
    module.training = False


class Draws(TorchDispatchMode):
    """Notes which modules draw random numbers; `hold`: every number is a constant, and dropout drops nothing."""

    def __init__(self, current_module: Callable[[], str] = lambda: "", *, hold: bool = False) -> None:
        """Have seen nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._current_module, self._hold = current_module, hold
        self.seen: dict[str, str] = {}  # the operation, by module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default and not isinstance(args[0], Tensor):
            return torch.tensor(args[0])  # a number in a graph, which torch hands to a mode as it is
        arguments = func._schema.arguments  # noqa: SLF001 - an operation has no other signature
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        dropped = given.get("dropout_p", given.get("dropout"))
        draws = dropped != 0 if isinstance(dropped, float) else torch.Tag.nondeterministic_seeded in func.tags
        if not draws or given.get("train") is False or given.get("training") is False:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.seen.setdefault(self._current_module(), name)
        calm = {argument: value for argument, value in _CALM.items() if argument in given}
        if self._hold and calm:
            return func(**{**given, **calm})
        found = func(*args, **kwargs)
        for each in tree_leaves(found) if self._hold else ():
            if isinstance(each, Tensor):
                _hold(each, name, given)
        return found


def _hold(drawn: Tensor, name: str, given: Mapping[str, Any]) -> None:
    """Overwrite what was drawn by what does not depend on the draw."""
    if name == "randperm":
        drawn.copy_(torch.arange(len(drawn), device=drawn.device))
    elif drawn.is_floating_point() or drawn.dtype == torch.bool:
        drawn.fill_(_HELD)
    else:
        drawn.fill_(given.get("low") or given.get("from") or 0)


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


def _split(module: nn.Module, layout: Layout, sizes: Sequence[int]) -> None:
    """Have a module see each micro-batch of the big batch by itself."""
    inner, samples = module.forward, sum(sizes)

    def narrowed(leaf: Any, dim: int | None, end: int, size: int) -> Any:
        if not isinstance(leaf, Tensor) or dim is None:
            return leaf
        per_sample = leaf.shape[dim] // samples
        return leaf.narrow(dim, (end - size) * per_sample, size * per_sample)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if len(leaves) != len(layout.given):
            return inner(*args, **kwargs)
        outputs = []
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            part = [narrowed(leaf, dim, end, size) for leaf, dim in zip(leaves, layout.given, strict=True)]
            some, named = tree_unflatten(part, spec)
            outputs.append(tree_flatten(inner(*some, **named)))
        columns = zip(*(each[0] for each in outputs), layout.output, strict=True)
        joined = [parts[0] if dim is None else torch.cat(parts, dim) for *parts, dim in columns]
        return tree_unflatten(joined, outputs[0][1])

    vars(module)["forward"] = forward

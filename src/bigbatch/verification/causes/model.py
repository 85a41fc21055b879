"""Causes inside the model: random numbers, state, BatchNorm and modules that couple samples; what turns them off."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.verification.model_copy import ModelCopy
from bigbatch.verification.runner import Runner

OUTSIDE = "loss_fn"  # where no module runs
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_HELD = 0.5  # what stands for every number that is drawn
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # arguments of kernels that drop
Dims = tuple[int | None, ...]  # of each leaf, the dimension along which its samples are


class Layout(NamedTuple):
    """Where the samples are in what a module takes and returns."""

    given: Dims
    output: Dims


@dataclass(frozen=True)
class Disabled:
    """What is turned off for a run; by default nothing is."""

    randomness: bool = False  # every random number is a constant
    state: bool = False  # every forward finds buffers and attributes as they were
    statistics: bool = False  # BatchNorm uses its running statistics
    split: Mapping[str, Layout] = field(default_factory=dict)  # modules that see each micro-batch apart, by name

    def __or__(self, other: "Disabled") -> "Disabled":
        """Turn off both."""
        return Disabled(
            self.randomness or other.randomness,
            self.state or other.state,
            self.statistics or other.statistics,
            {**self.split, **other.split},
        )

    def __sub__(self, other: "Disabled") -> "Disabled":
        """Turn on again what the other turns off."""
        return Disabled(
            self.randomness and not other.randomness,
            self.state and not other.state,
            self.statistics and not other.statistics,
            {name: layout for name, layout in self.split.items() if name not in other.split},
        )

    def applied(self, model: ModelCopy, sizes: Sequence[int]) -> AbstractContextManager[Any]:
        """Turn it off in a copy for good; `sizes` are the micro-batches of a big batch that runs whole."""
        modules = model.modules
        for module in dict.fromkeys(modules.values()):
            if self.statistics and isinstance(module, BatchNorm):  # in each forward: a loop may turn training mode on
                module.register_forward_pre_hook(_evaluate, prepend=True)
            elif self.state and not isinstance(module, BatchNorm):
                module.register_forward_pre_hook(_restorer(module), prepend=True)
        for name, layout in self.split.items() if len(sizes) > 1 else ():
            _split(modules[name], layout, sizes)
        if not self.randomness:
            return nullcontext()
        randomness = Randomness(devices_of(model.models))  # Python's and numpy's can only be repeated
        for each in model.models:
            each.register_forward_pre_hook(lambda *_: randomness.restore(), prepend=True)
        return Draws(hold=True)


def _evaluate(module: nn.Module, _: object) -> None:
    module.training = False


# Random numbers.


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
        calm = {name: value for name, value in _CALM.items() if name in given}
        dropped = given.get("dropout_p", given.get("dropout"))
        draws = dropped != 0 if isinstance(dropped, float) else torch.Tag.nondeterministic_seeded in func.tags
        if not draws or given.get("train") is False or given.get("training") is False:
            return func(*args, **kwargs)
        self.seen.setdefault(self._current_module(), func.overloadpacket.__name__)
        if self._hold and calm:
            return func(**{**given, **calm})
        found = func(*args, **kwargs)
        for each in tree_leaves(found) if self._hold else ():
            _fill(each, func.overloadpacket.__name__, given)
        return found


def _fill(found: Any, name: str, given: Mapping[str, Any]) -> None:
    """Overwrite what was drawn by what does not depend on the draw."""
    if not isinstance(found, Tensor):
        return
    if name == "randperm":
        found.copy_(torch.arange(len(found), device=found.device))
    elif found.is_floating_point() or found.dtype == torch.bool:
        found.fill_(_HELD)
    else:
        found.fill_(given.get("low") or given.get("from") or 0)


def random_modules(runner: Runner) -> dict[str, str]:
    """Return which modules draw random numbers in training, each with the operation."""
    stack: list[str] = []
    draws = Draws(lambda: stack[-1] if stack else OUTSIDE)
    with runner.copy() as model:
        randomness = Randomness(runner.model.devices)

        def look(*_: object) -> None:
            if not draws.seen and randomness.drawn():  # by Python or numpy, which no operation shows
                draws.seen[stack[-1] if stack else OUTSIDE] = "random"

        follow(model, stack, look, look)
        with draws, torch.no_grad():
            runner.forward(model, 0, runner.samples.batch.size)
            look()
    return draws.seen


# State.


def written_state(runner: Runner) -> dict[str, str]:
    """Return the buffers and attributes that a forward changes, each with its module; not those of BatchNorm."""
    with runner.copy(Disabled(randomness=True)) as model, torch.no_grad():
        before = {name: _state(module) for name, module in model.modules.items()}
        runner.forward(model, 0, runner.samples.batch.size)
        return {
            f"{name}.{key}" if name else key: name
            for name, module in model.modules.items()
            if not isinstance(module, BatchNorm)
            for key, value in _state(module).items()
            if not _is_same(before[name].get(key), value)
        }


def _state(module: nn.Module) -> dict[str, Any]:
    """Copy the buffers of one module, and the values that it keeps as plain attributes beside them."""
    plain = {name: value for name, value in vars(module).items() if name not in _OF_TORCH and _is_plain(value)}
    copied: dict[str, Any] = _copy({**plain, **dict(module.named_buffers(recurse=False))})
    return copied


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, int | float | str | Tensor) and not isinstance(value, nn.Parameter))


def _copy(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _restorer(module: nn.Module) -> Callable[..., None]:
    """Return a hook that restores a module's state before each forward.

    Of each module by itself, not of a model when it begins: in lock-step all micro-batches begin before one goes on.
    """
    kept = _state(module)

    def restore(module: nn.Module, _: object) -> None:
        for name in _state(module).keys() - kept.keys():
            delattr(module, name)
        for name, value in _copy(kept).items():
            (module._buffers if name in module._buffers else vars(module))[name] = value  # noqa: SLF001

    return restore


def _is_same(one: Any, other: Any) -> bool:
    flat, again = tree_flatten(one), tree_flatten(other)
    if flat[1] != again[1]:
        return False
    pairs = list(zip(flat[0], again[0], strict=True))
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in pairs
    )


# Modules that couple samples.


class _Call(NamedTuple):
    """One call of a module."""

    path: tuple[str, ...]  # the modules that ran, the innermost last
    given: list[Any]
    output: list[Any]


def training_norms(runner: Runner) -> tuple[str, ...]:
    """Return the BatchNorms that normalize by the batch, and have running statistics to use instead."""
    modules = runner.model.own.modules.items()
    return tuple(n for n, m in modules if isinstance(m, BatchNorm) and m.training and m.running_mean is not None)


def coupling_modules(runner: Runner, off: Disabled, tolerance: float) -> dict[str, Layout]:
    """Return the innermost modules whose output for the whole batch is not that for its two halves, joined.

    What a module takes must be the same in both; where samples are in a tensor shows in the shapes.
    """
    number, modules = runner.samples.batch.size, runner.model.own.modules
    whole, first, second = (
        _record(runner, off, *rows) for rows in ((0, number), (0, number // 2), (number // 2, number))
    )
    found: dict[tuple[str, ...], Layout] = {}
    for call, *halves in zip(whole, first, second, strict=False):
        if any(half.path != call.path for half in halves):
            break
        given = _compared(call.given, [half.given for half in halves], tolerance)
        output = _compared(call.output, [half.output for half in halves], tolerance)
        if given is not None and output is not None and given[1] and not output[1]:
            found.setdefault(call.path, Layout(given[0], output[0]))
    inner = {path: each for path, each in found.items() if not any(p[: len(path)] == path and p != path for p in found)}
    named = {path[-1]: layout for path, layout in inner.items()}
    return {name: layout for name, layout in named.items() if getattr(modules[name], "running_mean", None) is None}


def _record(runner: Runner, off: Disabled, start: int, end: int) -> list[_Call]:
    """Run some samples, and keep what every module takes and returns."""
    stack, given, calls = list[str](), list[list[Any]](), list[_Call]()

    def before(_name: str, args: Any, kwargs: Any) -> None:
        given.append([_copied(leaf) for leaf in tree_leaves((args, kwargs))])

    def after(_name: str, output: Any) -> None:
        taken, leaves = given.pop(), tree_leaves(output)
        if all(leaf.dim() for leaf in leaves if isinstance(leaf, Tensor)):  # what returns a loss is no layer
            calls.append(_Call(tuple(stack), taken, [_copied(leaf) for leaf in leaves]))

    whole = end - start == runner.samples.batch.size
    with runner.copy(off, runner.samples.sizes if whole else (end - start,)) as model, torch.no_grad():
        follow(model, stack, before, after)
        runner.forward(model, start, end)
    return calls


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else None


def _compared(whole: list[Any], halves: list[list[Any]], tolerance: float) -> tuple[Dims, bool] | None:
    """Return where the samples are in each tensor, and whether the halves make the whole; None where nothing tells."""
    if any(len(half) != len(whole) for half in halves):
        return None
    dims, same = [], True
    for tensor, *parts in zip(whole, *halves, strict=True):
        dim = None
        if isinstance(tensor, Tensor) and all(isinstance(p, Tensor) and p.dim() == tensor.dim() for p in parts):
            dim = next((d for d, n in enumerate(tensor.shape) if n == sum(p.shape[d] for p in parts)), None)
            joined = torch.cat(parts, dim) if dim is not None else parts[0]
            same = same and joined.shape == tensor.shape and _is_near(joined, tensor, tolerance)
        dims.append(dim)
    return (tuple(dims), same) if any(dim is not None for dim in dims) else None


def _is_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    a, b = torch.nan_to_num(one.double()), torch.nan_to_num(other.double())
    return bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(b))


def _split(module: nn.Module, layout: Layout, sizes: Sequence[int]) -> None:
    """Have a module see each micro-batch of the big batch by itself."""
    inner, samples = module.forward, sum(sizes)

    def narrowed(leaf: Any, dim: int | None, start: int, size: int) -> Any:
        if not isinstance(leaf, Tensor) or dim is None:
            return leaf
        per_sample = leaf.shape[dim] // samples
        return leaf.narrow(dim, start * per_sample, size * per_sample)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if len(leaves) != len(layout.given):
            return inner(*args, **kwargs)
        outputs, start = [], 0
        for size in sizes:
            pairs = zip(leaves, layout.given, strict=True)
            some, named = tree_unflatten([narrowed(leaf, dim, start, size) for leaf, dim in pairs], spec)
            outputs.append(tree_flatten(inner(*some, **named)))
            start += size
        columns = zip(*(each[0] for each in outputs), strict=True)
        joined = [
            column[0] if dim is None else torch.cat(column, dim)
            for column, dim in zip(columns, layout.output, strict=True)
        ]
        return tree_unflatten(joined, outputs[0][1])

    vars(module)["forward"] = forward


def follow(
    model: ModelCopy,
    stack: list[str],
    before: Callable[[str, Any, Any], None] = lambda *_: None,
    after: Callable[[str, Any], Any] = lambda *_: None,
) -> None:
    """Keep the names of a copy's modules that run in a stack; `after` may return another output for a module."""
    names = {id(module): name for name, module in reversed(model.modules.items())}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        before(names[id(module)], args, kwargs)
        stack.append(names[id(module)])

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        try:
            return after(names[id(module)], output)
        finally:
            if stack and stack[-1] == names[id(module)]:
                stack.pop()

    for module in dict.fromkeys(model.modules.values()):
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

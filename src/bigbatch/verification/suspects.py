"""What in a model or a loss may make the difference: random numbers, written state, BatchNorm, coupled samples."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves

from bigbatch.state.rng import Randomness
from bigbatch.verification.model_copy import ModelCopy
from bigbatch.verification.result import listed
from bigbatch.verification.runner import Runner
from bigbatch.verification.switches import NOTHING, RANDOMNESS, STATE, STATISTICS, Dims, Draws, Layout, Off, state_of

OUTSIDE = "loss_fn"  # where no module runs


class Suspect(NamedTuple):
    """Something in the model that may be a cause, and what turns it off."""

    kind: str
    off: Off
    names: list[str]
    evidence: str  # seen before any experiment


def random_numbers(runner: Runner) -> list[Suspect]:
    """Look for modules that draw random numbers in training."""
    stack: list[str] = []
    draws = Draws(lambda: stack[-1] if stack else OUTSIDE)
    with runner.copy() as model:
        randomness = Randomness(runner.model.devices)

        def look(*_: object) -> None:
            if not draws.seen and randomness.drawn():  # by Python or numpy, which no operation shows
                draws.seen[stack[-1] if stack else OUTSIDE] = "random"

        _follow(model, stack, look, look)
        with draws, torch.no_grad():
            runner.forward(model, 0, runner.samples.batch.size)
            look()
    by = listed([f"{_named(runner, name)} ({operation})" for name, operation in draws.seen.items()])
    evidence = f"random numbers are drawn by {by}"
    return [Suspect("randomness", {RANDOMNESS: None}, list(draws.seen), evidence)] if draws.seen else []


def written_state(runner: Runner) -> list[Suspect]:
    """Look for buffers and attributes that a forward changes; not those of BatchNorm."""
    with runner.copy({RANDOMNESS: None}) as model, torch.no_grad():
        modules = {name: module for name, module in model.modules.items() if not isinstance(module, BatchNorm)}
        before = {name: state_of(module) for name, module in modules.items()}
        runner.forward(model, 0, runner.samples.batch.size)
        written = {
            f"{name}.{key}" if name else key: name
            for name, module in modules.items()
            for key, value in state_of(module).items()
            if not _is_same(before[name].get(key), value)
        }
    evidence = f"forward writes {listed(list(written))}, which the next micro-batch reads"
    return [Suspect("state", {STATE: None}, list(dict.fromkeys(written.values())), evidence)] if written else []


def training_norms(runner: Runner) -> list[Suspect]:
    """Look for BatchNorms that normalize by the batch, and have running statistics to use instead."""
    modules = runner.model.own.modules.items()
    names = [n for n, m in modules if isinstance(m, BatchNorm) and m.training and m.running_mean is not None]
    evidence = f"{listed([_named(runner, name) for name in names])}: normalized by the samples of the micro-batch"
    return [Suspect("batch-norm", {STATISTICS: None}, names, evidence)] if names else []


def _is_same(one: Any, other: Any) -> bool:
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(leaves, others, strict=True)
    )


Tensors = list[Tensor | None]  # of the leaves of a tree; None for what is none
Call = tuple[tuple[str, ...], Tensors, Tensors]  # the modules that run, the innermost last, what it takes and returns


def recorded_calls(runner: Runner, off: Off, start: int, sizes: Sequence[int]) -> list[Call]:
    """Run some micro-batches as one; return what each module takes and returns. What returns a loss is no layer."""
    given, calls, stack = list[Tensors](), list[Call](), list[str]()

    def after(output: Any) -> None:
        taken = given.pop()
        is_layer = all(leaf.dim() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        if is_layer and not off.keys() & set(stack):
            calls.append((tuple(stack), taken, _tensors(output)))

    with runner.copy(off, sizes) as model, torch.no_grad():
        _follow(model, stack, lambda arguments: given.append(_tensors(arguments)), after)
        runner.forward(model, start, start + sum(sizes))
    return calls


def coupling_modules(runner: Runner, off: Off, tolerance: float) -> list[Suspect]:
    """Look for the innermost modules whose output for the big batch is not that for two parts of it."""
    modules, sizes, half = runner.model.own.modules, runner.samples.sizes, len(runner.samples.sizes) // 2
    parts = ((0, sizes), (0, sizes[:half]), (sum(sizes[:half]), sizes[half:]))
    found: dict[tuple[str, ...], Layout] = {}
    for calls in zip(*(recorded_calls(runner, off, *part) for part in parts), strict=False):
        (path, *others), takes, returns = zip(*calls, strict=True)
        if any(other != path for other in others):
            break
        given, output = _compared(takes, tolerance), _compared(returns, tolerance)
        if given is not None and output is not None and given[1] and not output[1]:
            found.setdefault(path, Layout(given[0], output[0]))
    inner = {path: each for path, each in found.items() if not any(p[: len(path)] == path and p != path for p in found)}
    accused = []
    for name, layout in {path[-1]: layout for path, layout in inner.items()}.items():
        if getattr(modules[name], "running_mean", None) is None:
            kind = "batch-norm" if isinstance(modules[name], BatchNorm) else "coupled-samples"
            evidence = "returns something else for a sample when other samples are in its batch"
            accused.append(Suspect(kind, {name: layout}, [name], f"{_named(runner, name)} {evidence}"))
    return accused


def _compared(whole_and_halves: Sequence[Tensors], tolerance: float) -> tuple[Dims, bool] | None:
    """Return where the samples are in each tensor, as shapes tell, and whether the halves make the whole; else None."""
    dims, same = list[int | None](), True
    for tensor, *parts in zip(*whole_and_halves, strict=False):
        dim, given = None, [part for part in parts if part is not None and tensor is not None]
        if tensor is not None and len(given) == len(parts) and all(part.dim() == tensor.dim() for part in given):
            dim = next((d for d, n in enumerate(tensor.shape) if n == sum(p.shape[d] for p in given)), None)
            joined = torch.cat(given, dim) if dim is not None else given[0]
            same = same and joined.shape == tensor.shape and _is_near(joined.double(), tensor.double(), tolerance)
        dims.append(dim)
    alike = len(set(map(len, whole_and_halves))) == 1 and any(dim is not None for dim in dims)
    return (tuple(dims), same) if alike else None


def _is_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).nan_to_num().norm() <= tolerance * other.nan_to_num().norm())


def _tensors(tree: Any) -> Tensors:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else None for leaf in tree_leaves(tree)]


def irreproducible_place(runner: Runner) -> str:
    """Return the first module that returns something else in a second run of the same big batch, or "backward"."""
    runs = zip(*(recorded_calls(runner, NOTHING, 0, runner.samples.sizes) for _ in range(2)), strict=False)
    return next((path[-1] or OUTSIDE for (path, _, one), (*_, other) in runs if not _is_same(one, other)), "backward")


def _named(runner: Runner, name: str) -> str:
    """Name a module with its class."""
    if name == OUTSIDE:
        return name
    kind = type(runner.model.own.modules[name]).__name__
    return f"{kind} '{name}'" if name else kind


def _follow(
    model: ModelCopy, stack: list[str], before: Callable[[Any], None], after: Callable[[Any], None] = lambda _: None
) -> None:
    """Keep the names of a copy's modules that run in a stack; call with what each takes and returns."""
    names = {id(module): name for name, module in reversed(model.modules.items())}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        before((args, kwargs))
        stack.append(names[id(module)])

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        after(output)
        stack.pop()

    for module in dict.fromkeys(model.modules.values()):
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

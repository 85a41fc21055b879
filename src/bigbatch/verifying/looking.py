"""Look at a model while the big batch goes through it: who draws, who writes, who looks from one sample to another."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batches.writing import PLAIN
from bigbatch.micro_steps.restoring import Buffers, Randomness
from bigbatch.micro_steps.survival import is_out_of_memory
from bigbatch.verifying.drawing import Draws
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.subject import Standing
from bigbatch.verifying.turning_off import Off, attributes, batch_dim, cut, put_back, put_together, tensors

OUTSIDE = "loss_fn"  # where no module runs


@dataclass
class Stack:
    """Which modules run, the innermost last."""

    names: list[str] = field(default_factory=list)

    def innermost(self) -> str:
        """Name the module that runs."""
        return self.names[-1] if self.names else OUTSIDE


def draws(runs: Runs) -> dict[str, str]:
    """Return who draws random numbers in training, and by which operation."""
    stack = Stack()
    seen = Draws(stack.innermost)
    with runs.standing(Off()) as standing, following(standing, stack), seen, torch.no_grad():
        randomness = Randomness(runs.subject.devices)
        runs.call(standing, runs.samples.whole(runs.dtype))
        if not seen.seen and randomness.drawn():  # by Python or numpy, which no operation shows
            seen.seen[OUTSIDE] = "random"
    return seen.seen


def writes(runs: Runs) -> dict[str, str]:
    """Return the buffers, and the numbers kept beside them, that a forward changes; but for those of BatchNorm."""
    with runs.standing(Off(randomness=True)) as standing, torch.no_grad():
        before = {name: _state(module) for name, module in standing.modules.items()}
        runs.call(standing, runs.samples.whole(runs.dtype))
        found = {}
        for name, module in standing.modules.items():
            if isinstance(module, Statistics):
                continue
            for key, value in _state(module).items():
                if not _same(before[name].get(key), value):
                    found[f"{name}.{key}" if name else key] = name
        return found


def across_samples(runs: Runs, off: Off, tolerance: float, known: Collection[str] = ()) -> tuple[str, ...]:
    """Return the innermost modules that give a sample another output when other samples are beside it.

    Those that are `known` are passed over, for what is around them.
    """
    samples = runs.samples.number
    sizes = (samples // 2, samples - samples // 2)
    found: dict[tuple[str, ...], str] = {}
    with runs.standing(off, sizes) as standing, torch.no_grad():
        modules, before = standing.modules, [(Buffers([m]), attributes(m)) for m in standing.models]
        for call in _recorded(runs, standing):
            for buffers, kept in before:
                buffers.restore()
                put_back(kept)
            name = call.path[-1]
            if name not in known and name not in off.apart and _looks_across(modules[name], call, sizes, tolerance):
                found[call.path] = name
    inner = [path for path in found if not any(other[: len(path)] == path and other != path for other in found)]
    return tuple(dict.fromkeys(found[path] for path in inner))


class _Call(NamedTuple):
    """One call of a module, as it was: copies of what it took and gave."""

    path: tuple[str, ...]  # the modules that ran, the innermost last
    given: Any
    output: Any


def _recorded(runs: Runs, standing: Standing) -> list[_Call]:
    """Run the big batch, and keep what every module took and gave that has samples."""
    stack, given, calls = Stack(), list[Any](), list[_Call]()
    samples = runs.samples.number

    def before(_name: str, args: Any, kwargs: Any) -> None:
        sampled = any(batch_dim(each, samples) is not None for each in tensors((args, kwargs)))
        try:
            given.append(_cloned((args, kwargs)) if sampled else None)
        except Exception as error:  # not everything can be copied
            if is_out_of_memory(error):
                raise
            given.append(None)

    def after(_name: str, output: Any) -> None:
        taken, made = given.pop(), list(tensors(output))
        # What returns a loss is no layer: whether a loss looks across samples is a question of its own.
        if taken is not None and all(each.dim() for each in made):
            calls.append(_Call(tuple(stack.names), taken, [each.clone() for each in made]))

    with following(standing, stack, before, after):
        runs.call(standing, runs.samples.whole(runs.dtype))
    return calls


def _looks_across(module: nn.Module, call: _Call, sizes: Sequence[int], tolerance: float) -> bool:
    """Run a module on the halves of what it got, and see whether it gives the same."""
    samples = sum(sizes)
    try:
        halves = [cut(call.given, samples, start, size) for start, size in zip((0, sizes[0]), sizes, strict=True)]
        alone = put_together([module(*args, **kwargs) for args, kwargs in map(_cloned, halves)], sizes)
        if not _differ(alone, call.output, samples, tolerance):
            return False
        # A module that does not give the same twice for all samples together has told nothing.
        args, kwargs = _cloned(call.given)
        again = list(tensors(module(*args, **kwargs)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return isinstance(module, Statistics)  # it wants more than one sample
    return not _differ(again, call.output, samples, tolerance)


def _cloned(tree: Any) -> Any:
    """Copy what a module may write into."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _cloned(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(_cloned(each) for each in tree)
    return tree if tree is None or isinstance(tree, (*PLAIN, torch.dtype, torch.device)) else copy.deepcopy(tree)


def _differ(alone: Any, together: Any, samples: int, tolerance: float) -> bool:
    pairs = zip(tensors(alone), tensors(together), strict=False)
    return any(
        one.shape == other.shape
        and other.is_floating_point()
        and batch_dim(other, samples) is not None
        and not _near(one.double(), other.double(), tolerance)
        for one, other in pairs
    )


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    apart = torch.linalg.vector_norm(torch.nan_to_num(one - other))
    return bool(apart <= tolerance * torch.linalg.vector_norm(torch.nan_to_num(other)))


@contextmanager
def following(
    standing: Standing,
    stack: Stack,
    before: Callable[[str, Any, Any], None] | None = None,
    after: Callable[[str, Any], Any] | None = None,
) -> Iterator[None]:
    """Know which module runs; `after` may return another output in the place of a module's."""
    names: Mapping[int, str] = {id(module): name for name, module in reversed(standing.modules.items())}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if before is not None:
            before(names[id(module)], args, kwargs)
        stack.names.append(names[id(module)])

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        try:
            return after(names[id(module)], output) if after is not None else None
        finally:
            if stack.names and stack.names[-1] == names[id(module)]:
                stack.names.pop()

    with ExitStack() as handles:
        for module in dict.fromkeys(standing.modules.values()):
            handles.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            handles.callback(module.register_forward_hook(leave).remove)
        yield


def _state(module: nn.Module) -> dict[str, Any]:
    buffers = {name: b.detach().clone() for name, b in module.named_buffers(recurse=False)}
    own = {k: v for k, v in vars(module).items() if isinstance(v, int | float | Tensor) and k != "training"}
    kept = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in own.items()}
    return {**kept, **buffers}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is None or type(one) is not type(other) or one == other

"""Look at a model while the big batch goes through it: who draws, who writes, who looks from one sample to another."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.state.oom import is_out_of_memory
from bigbatch.state.snapshot import Buffers, Randomness
from bigbatch.verifying.apart import Apart, divided, guessed, mapped_tensors, own_copy, put_together, seen, tensors
from bigbatch.verifying.attributes import attributes, copied, of_module, put_back
from bigbatch.verifying.drawing import Draws
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.subject import Standing
from bigbatch.verifying.trying import tried
from bigbatch.verifying.turning_off import Off

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
    noted = Draws(stack.innermost)
    with runs.standing(Off()) as standing:
        randomness = Randomness(runs.subject.devices)

        def look(*_: object) -> None:  # whenever another module begins to run
            if not noted.seen and randomness.drawn():  # by Python or numpy, which no operation shows
                noted.seen[stack.innermost()] = "random"

        with following(standing, stack, look, look), noted, torch.no_grad():
            runs.call(standing, runs.samples.whole(runs.dtype))
            look()
    return noted.seen


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


def across_samples(runs: Runs, off: Off, tolerance: float, known: Collection[str] = ()) -> tuple[Apart, ...]:
    """Return the innermost modules that give a sample another output when other samples are beside it.

    Those that are `known` are passed over, for what is around them.
    """
    samples = runs.samples.number
    sizes, passed = (samples // 2, samples - samples // 2), off.apart_names.union(known)
    found: dict[tuple[str, ...], Apart] = {}
    less = _shapes(runs, off, sizes[0])
    with runs.standing(off, sizes) as standing, torch.no_grad():
        modules, before = standing.modules, [(Buffers([m]), attributes(m)) for m in standing.models]
        calls = _recorded(runs, standing)
        alike = [call.path for call in calls] == [path for path, _, _ in less]
        for place, call in enumerate(calls):
            for buffers, kept in before:
                buffers.restore()
                put_back(kept)
            where = _where(call, less[place] if alike else None, samples, sizes[0])
            if where.name not in passed and _looks_across(modules[where.name], call, where, sizes, tolerance):
                found[call.path] = where
    inner = [path for path in found if not any(other[: len(path)] == path and other != path for other in found)]
    return tuple({found[path].name: found[path] for path in inner}.values())


_Shapes = tuple[tuple[str, ...], list[tuple[int, ...]], list[tuple[int, ...]]]


class _Call(NamedTuple):
    """One call of a module, as it was: copies of what it took and gave."""

    path: tuple[str, ...]  # the modules that ran, the innermost last
    given: Any
    output: list[Tensor]


def _recorded(runs: Runs, standing: Standing) -> list[_Call]:
    """Run the big batch, and keep what every module took and gave."""
    stack, given, calls = Stack(), list[Any](), list[_Call]()

    def before(_name: str, args: Any, kwargs: Any) -> None:
        given.append(tried(lambda: _cloned((args, kwargs)), None))  # not everything can be copied

    def after(_name: str, output: Any) -> None:
        taken, made = given.pop(), list(tensors(output))
        if _is_layer(made):
            calls.append(_Call(tuple(stack.names), taken, [each.clone() for each in made]))

    with following(standing, stack, before, after):
        runs.call(standing, runs.samples.whole(runs.dtype))
    return calls


def _shapes(runs: Runs, off: Off, number: int) -> list[_Shapes]:
    """Run fewer samples, and keep the shapes of what every module took and gave."""
    stack, given, calls = Stack(), list[Any](), list[_Shapes]()

    def before(_name: str, args: Any, kwargs: Any) -> None:
        given.append([tuple(each.shape) for each in tensors((args, kwargs))])

    def after(_name: str, output: Any) -> None:
        taken, made = given.pop(), list(tensors(output))
        if _is_layer(made):
            calls.append((tuple(stack.names), taken, [tuple(each.shape) for each in made]))

    with runs.standing(off) as standing, following(standing, stack, before, after), torch.no_grad():
        tried(lambda: runs.call(standing, runs.samples.rows(0, number, runs.dtype)), None)
    return calls


def _is_layer(made: Sequence[Tensor]) -> bool:
    """What returns a loss is no layer: whether a loss looks across samples is a question of its own."""
    return all(each.dim() for each in made)


def _where(call: _Call, less: _Shapes | None, samples: int, fewer: int) -> Apart:
    """Find out where samples lie in what a module took and gave."""
    given, name = list(tensors(call.given)), call.path[-1]
    if less is not None:
        told = [
            seen([tuple(t.shape) for t in some], shapes, samples, fewer)
            for some, shapes in zip((given, call.output), less[1:], strict=True)
        ]
        if told[0] is not None and told[1] is not None:
            return Apart(name, told[0], told[1])
    return Apart(name, guessed(given, samples), guessed(call.output, samples))


def _looks_across(module: nn.Module, call: _Call, where: Apart, sizes: Sequence[int], tolerance: float) -> bool:
    """Run a module on the halves of what it got, and see whether it gives the same."""
    if call.given is None or all(dim is None for dim in where.given) or all(dim is None for dim in where.output):
        return False
    try:
        halves = [_cloned(half) for half in divided(call.given, where.given, sizes)]
        alone = put_together([module(*args, **kwargs) for args, kwargs in halves], sizes, where.output)
        if not _differ(list(tensors(alone)), call.output, where, tolerance):
            return False
        # A module that does not give the same twice for all samples together has told nothing.
        args, kwargs = _cloned(call.given)
        again = list(tensors(module(*args, **kwargs)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return isinstance(module, Statistics)  # it wants more than one sample
    return not _differ(again, call.output, where, tolerance)


def _cloned(tree: Any) -> Any:
    return mapped_tensors(tree, lambda tensor: tensor.clone(), own_copy)


def _differ(alone: Sequence[Tensor], together: Sequence[Tensor], where: Apart, tolerance: float) -> bool:
    return any(
        dim is not None
        and one.shape == other.shape
        and other.is_floating_point()
        and not _near(one.double(), other.double(), tolerance)
        for one, other, dim in zip(alone, together, where.output, strict=False)
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
    return copied({**of_module(module), **dict(module.named_buffers(recurse=False))})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is None or type(one) is not type(other) or one == other

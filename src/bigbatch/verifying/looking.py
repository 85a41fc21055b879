"""Look at a model while the big batch goes through it: who draws, who writes, who looks from one sample to another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

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


def across_samples(runs: Runs, off: Off, tolerance: float) -> tuple[str, ...]:
    """Return the innermost modules that give a sample another output when other samples are beside it."""
    samples = runs.samples.number
    sizes = (samples // 2, samples - samples // 2)
    stack = Stack()
    busy = _Busy(stack)
    found: dict[tuple[str, ...], str] = {}
    pending: list[Any] = []

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        del name
        if not busy.now:
            pending.append(busy.apart(module, args, kwargs, samples, sizes))

    def after(name: str, output: Any) -> None:
        if busy.now:
            return
        alone = pending.pop()
        if alone is not None and _differ(alone, output, samples, tolerance):
            found[tuple(stack.names)] = name

    with runs.standing(off, sizes) as standing, following(standing, stack, before, after), torch.no_grad():
        runs.call(standing, runs.samples.whole(runs.dtype))
    inner = [path for path in found if not any(other[: len(path)] == path and other != path for other in found)]
    return tuple(dict.fromkeys(found[path] for path in inner if found[path] not in off.apart))


class _Busy:
    """Runs a module on halves of what it is about to get, and leaves no trace of it."""

    def __init__(self, stack: Stack) -> None:
        self.now, self._stack = False, stack

    def apart(self, module: nn.Module, args: Any, kwargs: Any, samples: int, sizes: Sequence[int]) -> Any:
        """Return what a module gives for the halves, joined; None where it cannot be said."""
        if not any(batch_dim(each, samples) is not None for each in tensors((args, kwargs))):
            return None
        buffers, kept, depth = Buffers([module]), attributes(module), len(self._stack.names)
        self.now = True
        try:
            parts = [
                cut((args, kwargs), samples, start, size) for start, size in zip((0, sizes[0]), sizes, strict=True)
            ]
            cloned = [_cloned(part) for part in parts]
            return put_together([module(*some, **named) for some, named in cloned], sizes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _FAILED if isinstance(module, Statistics) else None  # it wants more than one sample
        finally:
            self.now = False
            del self._stack.names[depth:]  # modules inside that failed have not left
            buffers.restore()
            put_back(kept)


_FAILED = object()


def _cloned(tree: Any) -> Any:
    """Copy what a module may write into."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _cloned(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(_cloned(each) for each in tree)
    return tree


def _differ(alone: Any, together: Any, samples: int, tolerance: float) -> bool:
    if alone is _FAILED:
        return True
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
    before: Callable[[str, nn.Module, Any, Any], None] | None = None,
    after: Callable[[str, Any], Any] | None = None,
) -> Iterator[None]:
    """Know which module runs; `after` may return another output in the place of a module's."""
    names: Mapping[int, str] = {id(module): name for name, module in reversed(standing.modules.items())}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if before is not None:
            before(names[id(module)], module, args, kwargs)
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

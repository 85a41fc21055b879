"""What can be turned off in a model, to see whether a difference goes with it."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batches.writing import PLAIN
from bigbatch.micro_steps.restoring import Randomness, devices_of
from bigbatch.verifying.drawing import Draws
from bigbatch.verifying.subject import Standing

Written = dict[nn.Module, dict[str, Any]]  # numbers and tensors that modules keep as plain attributes


@dataclass(frozen=True)
class Off:
    """What is turned off for a run; by default nothing is."""

    statistics: bool = False  # BatchNorm uses what it has learned
    randomness: bool = False  # each random number is its mean
    state: bool = False  # every forward finds the buffers as they were
    apart: tuple[str, ...] = ()  # these modules see each micro-batch by itself, in the big batch, too

    def without(self, other: "Off") -> "Off":
        """Turn on again what `other` turns off."""
        return Off(
            statistics=self.statistics and not other.statistics,
            randomness=self.randomness and not other.randomness,
            state=self.state and not other.state,
            apart=tuple(name for name in self.apart if name not in other.apart),
        )

    def and_off(self, other: "Off") -> "Off":
        """Turn that off, too."""
        return Off(
            statistics=self.statistics or other.statistics,
            randomness=self.randomness or other.randomness,
            state=self.state or other.state,
            apart=(*self.apart, *(name for name in other.apart if name not in self.apart)),
        )

    @contextmanager
    def around(self, standing: Standing, sizes: Sequence[int] = ()) -> Iterator[None]:
        """Turn it off for what runs inside; `sizes` are the micro-batches of a big batch that runs whole."""
        with ExitStack() as stack:
            if self.statistics:
                stack.enter_context(_resting(standing.models))
            if self.state:
                stack.enter_context(_as_it_was(standing.models))
            if self.randomness:
                stack.enter_context(_drawing_again(standing.models))
                stack.enter_context(Draws(still=True))
            modules = standing.modules
            for name in self.apart if len(sizes) > 1 else ():
                stack.enter_context(apart(modules[name], sizes))
            yield


@contextmanager
def _resting(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have BatchNorm use what it has learned, also where a loop puts the model into training mode."""
    norms = [m for m in dict.fromkeys(m for each in models for m in each.modules()) if isinstance(m, Statistics)]
    modes = {module: module.training for module in norms}

    def rest(module: nn.Module, _: object) -> None:
        module.training = False

    handles = [module.register_forward_pre_hook(rest, prepend=True) for module in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _as_it_was(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have every forward of a module find its buffers, and its numbers, as they are now.

    Of each module by itself, not of a model when it begins: in lock-step all micro-batches begin before one goes on.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(module for each in models for module in each.modules()):
            if isinstance(module, Statistics):  # whose statistics are not read where they are written
                continue
            buffers = {name: b.detach().clone() for name, b in module.named_buffers(recurse=False)}
            written = {module: copied(_own(module))}

            def restore(module: nn.Module, _: object, buffers: Any = buffers, written: Written = written) -> None:
                module._buffers.update(copied(buffers))  # noqa: SLF001 - there is no other way to put one back
                put_back(written)

            stack.callback(module.register_forward_pre_hook(restore, prepend=True).remove)
        yield


@contextmanager
def _drawing_again(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have every forward of a model draw the same numbers: those of Python and numpy have no mean to stand for them."""
    randomness = Randomness(devices_of(models))
    handles = [m.register_forward_pre_hook(lambda *_: randomness.restore(), prepend=True) for m in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def apart(module: nn.Module, sizes: Sequence[int]) -> Iterator[None]:
    """Give a module each micro-batch of a big batch by itself, and join what it returns."""
    inner, own = module.forward, "forward" in vars(module)
    samples = sum(sizes)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not any(batch_dim(leaf, samples) is not None for leaf in tensors((args, kwargs))):
            return inner(*args, **kwargs)
        parts = [cut((args, kwargs), samples, start, size) for start, size in zip(_starts(sizes), sizes, strict=True)]
        return put_together([inner(*some, **named) for some, named in parts], sizes)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own:
            vars(module)["forward"] = inner
        else:
            del vars(module)["forward"]


def attributes(model: nn.Module) -> Written:
    """Return the numbers and tensors that modules keep beside their buffers."""
    return {module: copied(_own(module)) for module in model.modules()}


def put_back(written: Written) -> None:
    """Put them back as they were; what is new is gone."""
    for module, kept in written.items():
        for name in _own(module).keys() - kept.keys():
            del vars(module)[name]
        vars(module).update(copied(kept))


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what can be written to."""
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _own(module: nn.Module) -> dict[str, Any]:
    kinds = (int, float, Tensor)
    return {
        k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "training" and not k.startswith("__")
    }


def batch_dim(tensor: Tensor, samples: int) -> int | None:
    """Return the dimension along which a tensor has its samples, where one looks so: the first, else the second."""
    if tensor.dim() and tensor.shape[0] and tensor.shape[0] % samples == 0:
        return 0
    return 1 if tensor.dim() > 1 and tensor.shape[1] == samples else None


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of whatever a module takes or returns."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from tensors(each)


def cut(tree: Any, samples: int, start: int, size: int) -> Any:
    """Return the rows of some samples; what is no container is copied, as a cache of keys would be written to."""
    if isinstance(tree, Tensor):
        dim = batch_dim(tree, samples)
        if dim is None:
            return tree
        rows = tree.shape[dim] // samples
        return tree.narrow(dim, start * rows, size * rows)
    if isinstance(tree, dict):
        return {key: cut(each, samples, start, size) for key, each in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(cut(each, samples, start, size) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(cut(each, samples, start, size) for each in tree)
    return tree if tree is None or isinstance(tree, (*PLAIN, torch.dtype, torch.device)) else copy.deepcopy(tree)


def put_together(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join what a module returned for each micro-batch: a number is their mean, and what has no samples the first's."""
    first = parts[0]
    if isinstance(first, Tensor) and not first.dim() and first.is_floating_point():
        return torch.stack([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]).sum()
    if isinstance(first, Tensor):
        dims = [batch_dim(part, size) for part, size in zip(parts, sizes, strict=True)]
        dim = 0 if all(d == 0 for d in dims) else 1 if all(d is not None for d in dims) else None
        return first if dim is None else torch.cat(list(parts), dim)
    if isinstance(first, Mapping):
        joined = {key: put_together([part[key] for part in parts], sizes) for key in first}
        return joined if type(first) is dict else _like(first, joined)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(put_together(each, sizes) for each in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(put_together(each, sizes) for each in zip(*parts, strict=True))
    return first


def _like(mapping: Mapping[Any, Any], joined: dict[Any, Any]) -> Any:
    made = copy.copy(mapping)
    for key, value in joined.items():
        made[key] = value  # type: ignore[index]  # a Hugging Face ModelOutput can be written to
    return made


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:place]) for place in range(len(sizes))]


NOTHING = Off()


def with_apart(off: Off, names: Sequence[str]) -> Off:
    """Turn these modules' looking across samples off, too."""
    return replace(off, apart=(*off.apart, *(name for name in names if name not in off.apart)))

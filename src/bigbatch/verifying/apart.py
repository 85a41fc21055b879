"""Give a module some samples of what it gets, and join what it returns: where they lie in each tensor, and how."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.batch.tree import PLAIN

Dims = tuple[int | None, ...]  # of each tensor, the dimension along which its samples lie; None where it has none


@dataclass(frozen=True)
class Apart:
    """A module, and where the samples lie in what it takes and gives."""

    name: str
    given: Dims = ()
    output: Dims = ()


@contextmanager
def running_apart(module: nn.Module, where: Apart, sizes: Sequence[int]) -> Iterator[None]:
    """Give a module each micro-batch of a big batch by itself."""
    inner, own = module.forward, "forward" in vars(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        dims = where.given if len(where.given) == _number((args, kwargs)) else guessed((args, kwargs), sum(sizes))
        if all(dim is None for dim in dims):
            return inner(*args, **kwargs)
        parts = [inner(*some, **named) for some, named in divided((args, kwargs), dims, sizes)]
        return put_together(parts, sizes, where.output)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own:
            vars(module)["forward"] = inner
        else:
            del vars(module)["forward"]


def guessed(tree: Any, samples: int) -> Dims:
    """Return where samples seem to lie, by the sizes of tensors alone: along the first dimension, else the second."""
    return tuple(_guess(tensor, samples) for tensor in tensors(tree))


def seen(shapes: Sequence[Sequence[int]], fewer: Sequence[Sequence[int]], samples: int, less: int) -> Dims | None:
    """Return where samples lie: along what is shorter where there are fewer of them; None where it cannot be told."""
    if len(shapes) != len(fewer) or any(len(one) != len(other) for one, other in zip(shapes, fewer, strict=True)):
        return None
    pairs = zip(shapes, fewer, strict=True)
    return tuple(
        next((d for d, rows in enumerate(one) if rows % samples == 0 and rows // samples * less == other[d] > 0), None)
        for one, other in pairs
    )


def divided(tree: Any, dims: Dims, sizes: Sequence[int]) -> list[Any]:
    """Return the samples of each micro-batch; what is no container is copied, as a cache of keys is written to."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [_cut(tree, dims, sum(sizes), start, size) for start, size in zip(starts, sizes, strict=True)]


def put_together(parts: Sequence[Any], sizes: Sequence[int], dims: Dims = ()) -> Any:
    """Join what a module returned for each micro-batch: a number is their mean, and what has no samples the first's."""
    columns = list(zip(*(list(tensors(part)) for part in parts), strict=True))
    if len(dims) != len(columns):
        every = [guessed(part, size) for part, size in zip(parts, sizes, strict=True)]
        dims = tuple(max(column) if None not in column else None for column in zip(*every, strict=True))
    joined = iter([_joined(column, sizes, dim) for column, dim in zip(columns, dims, strict=True)])
    return mapped_tensors(parts[0], lambda _: next(joined))


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


def mapped_tensors(
    tree: Any, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Return the same structure with every tensor replaced, in the order of `tensors`, and every other leaf, too."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        made = {key: mapped_tensors(each, function, other) for key, each in tree.items()}
        return made if type(tree) is dict else _like(tree, made)
    if isinstance(tree, list | tuple):
        each_made = [mapped_tensors(each, function, other) for each in tree]
        return type(tree)(*each_made) if hasattr(tree, "_fields") else type(tree)(each_made)
    return other(tree)


def own_copy(leaf: Any) -> Any:
    """Copy what a module may write into, and is no tensor: a cache, a state."""
    return leaf if leaf is None or isinstance(leaf, (*PLAIN, torch.dtype, torch.device)) else copy.deepcopy(leaf)


def _cut(tree: Any, dims: Dims, samples: int, start: int, size: int) -> Any:
    along = iter(dims)

    def cut(tensor: Tensor) -> Tensor:
        dim = next(along)
        if dim is None:
            return tensor
        rows = tensor.shape[dim] // samples
        return tensor.narrow(dim, start * rows, size * rows)

    return mapped_tensors(tree, cut, own_copy)


def _joined(column: Sequence[Tensor], sizes: Sequence[int], dim: int | None) -> Tensor:
    first = column[0]
    if not first.dim() and first.is_floating_point():
        return torch.stack([part * (size / sum(sizes)) for part, size in zip(column, sizes, strict=True)]).sum()
    return first if dim is None else torch.cat(list(column), dim)


def _guess(tensor: Tensor, samples: int) -> int | None:
    if tensor.dim() and tensor.shape[0] and tensor.shape[0] % samples == 0:
        return 0
    return 1 if tensor.dim() > 1 and tensor.shape[1] == samples else None


def _number(tree: Any) -> int:
    return sum(1 for _ in tensors(tree))


def _like(mapping: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    alike = copy.copy(mapping)
    for key, value in made.items():
        alike[key] = value  # type: ignore[index]  # a Hugging Face ModelOutput can be written to
    return alike

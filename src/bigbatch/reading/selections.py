"""What choosing rows does to samples: slices, chunks, positions, masks, indices; and putting rows together."""

import math
from dataclasses import replace

import torch
from torch.autograd.graph import Node

from bigbatch.reading.graph import edges, operation, saved, saved_dim, saved_indices, saved_tensor, shape, signed
from bigbatch.reading.layout import PICKED, SHARED, Axis, Dim, Layout, Tag, Taken, reshaped
from bigbatch.reading.rules import Inputs, everything, only_input, size_of


def _chunk(layout: Layout, dim: int, size: int, name: str, *, outer: bool = True) -> Layout:
    """Give the layout of a tensor of which an even share along `dim` was taken."""
    part = layout[dim]
    took = math.prod(n for n, _ in part)
    if took == size:
        return layout
    if took == 0 or size % took:
        return (*layout[:dim], ((size, name),), *layout[dim + 1 :])
    share = (size // took, SHARED)
    return (*layout[:dim], (share, *part) if outer else (*part, share), *layout[dim + 1 :])


def take_slice(node: Node, _output: int, layout: Layout) -> Inputs:
    """Even shares (`rewards[:n]`, `rewards[n:]`, `x[::2]`) stay apart; other cuts move rows past each other."""
    edge = only_input(node)
    sizes = size_of(edge)
    dim = saved_dim(node, "dim", len(sizes))
    size, took = sizes[dim], shape(node, 0)[dim]
    start, step = saved(node, "start") or 0, saved(node, "step") or 1
    start = signed(start)
    start = max(start + size, 0) if start < 0 else start
    even = took and (start % took == 0 if step == 1 else start < step and took * step == size)
    if took == size or even:
        return [(edge, _chunk(layout, dim, size, operation(node), outer=step == 1))]
    return [(edge, (*layout[:dim], ((size, operation(node)),), *layout[dim + 1 :]))]


def split(node: Node, _output: int, layout: Layout) -> Inputs:
    """Equal chunks stay apart; unequal ones move rows past each other."""
    edge = only_input(node)
    sizes = size_of(edge)
    dim = saved_dim(node, "dim", len(sizes))
    took = {shape(node, n)[dim] for n in range(_results(node))}
    if len(took) == 1:
        return [(edge, _chunk(layout, dim, sizes[dim], operation(node)))]
    return [(edge, (*layout[:dim], ((sizes[dim], operation(node)),), *layout[dim + 1 :]))]


def _results(node: Node) -> int:
    metadata: object = getattr(node, "_input_metadata", ())
    return len(metadata) if isinstance(metadata, list | tuple) else 1


def select(node: Node, _output: int, layout: Layout) -> Inputs:
    """One position along a dimension; of an unbind, all of them go somewhere."""
    edge = only_input(node)
    sizes = size_of(edge)
    dim = saved_dim(node, "dim", len(sizes))
    tag = PICKED if operation(node) == "Select" else SHARED
    return [(edge, (*layout[:dim], ((sizes[dim], tag),), *layout[dim:]))]


def _reordered(dim: Dim, by: tuple[str, object]) -> Dim:
    return tuple((size, tag.reordered(by) if isinstance(tag, Axis) else tag) for size, tag in dim)


def _tag(dim: Dim, name: str) -> Tag:
    """Return what the rows of a glued dimension are once they were put in another order: apart, or mixed by `name`."""
    parts = [(size, tag) for size, tag in dim if size > 1] or list(dim)
    if not parts:
        return PICKED
    apart = len(parts) == 1 or all(isinstance(tag, Axis) for _, tag in parts)
    return parts[0][1] if apart else name


def index(node: Node, _output: int, layout: Layout) -> Inputs:
    """Rows chosen by a mask or by numbers: still rows, but no longer beside the rows they lay beside."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    chosen = [(d, i) for d, i in enumerate(saved_indices(node)) if i is not None]
    places = [d for d, _ in chosen]
    if not chosen or places != list(range(places[0], places[0] + len(places))):
        return everything(node, 0, layout)
    first, tensor = chosen[0]
    covers = tensor.dim() if tensor.dtype == torch.bool else 1
    if covers == 1 and tensor.dim() != 1:
        return everything(node, 0, layout)
    rows = layout[first]
    taken = math.prod(n for n, _ in rows)
    covered = sizes[first] if len(chosen) > 1 or covers == 1 else taken
    if taken > covered:  # some rows were taken twice
        return everything(node, 0, layout)
    head: Dim = _reordered(((sizes[first], _tag(rows, name)),), (name, tensor.data_ptr()))
    picked: Layout = tuple(((size, PICKED),) for size in sizes[first + 1 : first + covers + len(chosen) - 1])
    return [(edge, (*layout[:first], head, *picked, *layout[first + 1 :]))]


def index_select(node: Node, _output: int, layout: Layout) -> Inputs:
    """Rows chosen by numbers along one dimension."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    dim = saved_dim(node, "dim", len(sizes))
    by = saved_tensor(node, "index")
    if by is None or by.numel() > sizes[dim]:
        return [(edge, (*layout[:dim], ((sizes[dim], name),), *layout[dim + 1 :]))]
    rows = _reordered(((sizes[dim], _tag(layout[dim], name)),), (name, by.data_ptr()))
    return [(edge, (*layout[:dim], rows, *layout[dim + 1 :]))]


def masked_select(node: Node, _output: int, layout: Layout) -> Inputs:
    """Elements chosen by a mask, outermost dimension first."""
    edge = only_input(node)
    sizes = size_of(edge)
    mask = saved_tensor(node, "mask")
    by = (operation(node), mask.data_ptr() if mask is not None else None)
    rows = _reordered(((sizes[0], _tag(layout[0], operation(node))),), by)
    return [(edge, (rows, *(((size, PICKED),) for size in sizes[1:])))]


def cat(node: Node, _output: int, layout: Layout) -> Inputs:
    """Concatenation: along its dimension each input holds some of the rows."""
    dim = saved_dim(node, "dim", len(layout))
    inputs = [edge for edge in edges(node) if edge[0] is not None and len(size_of(edge)) == len(layout)]
    taken = [size_of(edge)[dim] for edge in inputs]
    own = _own_rows(layout[dim], taken, len(edges(node)))
    rows = [own if own is not None else _some_rows(layout[dim], taken, n) for n in taken]
    return [(edge, (*layout[:dim], part, *layout[dim + 1 :])) for edge, part in zip(inputs, rows, strict=True)]


def _own_rows(dim: Dim, taken: list[int], inputs: int) -> Dim | None:
    """Give what each input's rows are where a reshape or a chunk has told equal inputs apart again: `view(2, n)`.

    That is where a cut lies between the inputs. One through rows that are not all apart would pair rows of one input.
    """
    total = math.prod(size for size, _ in dim)
    parts = tuple((size, tag) for size, tag in dim if size > 1)
    size = taken[0] if taken else 0
    if set(taken) != {size} or size * inputs != total or len(taken) < inputs - 1:
        return None
    if size == 1:  # a batch of one: what is left of it behind the inputs
        return dim[-1:] if len(dim) > 1 and dim[:-1] == parts else None
    if len(parts) == 1:
        return None
    outer, inner = reshaped((parts,), (inputs, size), "Cat")
    between = outer == parts[: len(outer)] and not all(isinstance(tag, Taken) for _, tag in inner)
    return inner if between or all(isinstance(tag, Axis) for _, tag in inner) else None


def _some_rows(dim: Dim, taken: list[int], size: int) -> Dim:
    """Give what an input's rows are where they lie among the others': no longer beside any but their like."""
    tag = _tag(dim, "Cat")
    if isinstance(tag, Axis):
        several = sum(part > 1 for part, _ in dim) > 1
        tag = replace(tag.reordered(("Cat", tuple(taken))) if several else tag, lone=size == 1 and len(taken) > 1)
    return ((size, tag),)


def stack(node: Node, _output: int, layout: Layout) -> Inputs:
    """Stacking: the new dimension goes."""
    dim = saved_dim(node, "dim", len(layout))
    return [(edge, layout[:dim] + layout[dim + 1 :]) for edge in edges(node) if edge[0] is not None]


def diagonal(node: Node, _output: int, layout: Layout) -> Inputs:
    """The diagonal pairs each row with the column of its number."""
    edge = only_input(node)
    sizes = size_of(edge)
    dims = saved_dim(node, "dim1", len(sizes)), saved_dim(node, "dim2", len(sizes))
    rest = iter(layout[:-1])
    tag = _tag(layout[-1], operation(node)) if sizes[dims[0]] == sizes[dims[1]] else operation(node)
    return [(edge, tuple(((size, tag),) if d in dims else next(rest) for d, size in enumerate(sizes)))]

"""What putting rows together does to samples: cat and stack, rows put where an index says, parts written over."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.autograd.graph import Node

from bigbatch.loss import refusals
from bigbatch.loss.graph import Edge, edges, operation, saved, saved_dim, saved_indices, saved_tensor, shape
from bigbatch.loss.layout import Axis, Dim, Layout, Taken, mixed, reshaped
from bigbatch.loss.rules import MATMULS, Inputs, along, size_of
from bigbatch.loss.selections import PUTS, along_rows, key, reordered, results, tag_of, takes_each_row_once, with_dim

Place: TypeAlias = tuple[int, ...]  # the dimensions of a tensor that a part of it has
_OPERATIONS_ON_A_ROW = 64
_LAYERS = 32  # operations from rows that an index has taken to where it puts them back


def put_rows(node: Node, output: int, layout: Layout) -> Inputs:
    """Rows added or copied to where an index says; those that it puts them into are such themselves, or mixed."""
    mixing: Inputs = along(node, output, layout)
    (base, mixed_base), (source, _) = mixing
    rows = along_rows(node, layout, size_of(source)) if source[0] is not None else None
    if rows is None:
        return mixing
    return [(base, layout if base[0] is not None and operation(base[0]) in PUTS else mixed_base), (source, rows)]


def index_put(node: Node, _output: int, layout: Layout) -> Inputs:
    """Values put in the places of others, which stay where they are; `index` by the same index takes them back."""
    edge, value, name = edges(node)[0], edges(node)[1], operation(node)
    chosen = [(d, i) for d, i in enumerate(saved_indices(node)) if i is not None]
    filled = edge[0] is not None and operation(edge[0]) in PUTS  # one of several that fill a tensor
    by_number = [
        d
        for d, i in chosen[:1]
        if i.dtype != torch.bool and (len(chosen) == 1 or (i.is_cpu and not takes_each_row_once(i)))
    ]
    kept = tuple(((shape(node)[d], name),) if d in by_number and not filled else dim for d, dim in enumerate(layout))
    result: Inputs = [(edge, kept)] if edge[0] is not None else []
    if value[0] is None:
        return result
    sizes = size_of(value)
    if not chosen or saved(node, "accumulate"):
        return [*result, (value, mixed(sizes, name))]
    first, tensor = chosen[0]
    covers = tensor.dim() if tensor.dtype == torch.bool else len(chosen)
    flat = not first and 0 < len(sizes) == len(layout) - covers  # of one row torch leaves its own dimension out
    size = 1 if flat else sizes[first] if first < len(sizes) else 0
    number = tensor.sum if tensor.dtype == torch.bool else tensor.numel
    if (
        (tensor.dtype != torch.bool and tensor.dim() != 1)
        or (not flat and covers + len(sizes) - 1 != len(layout))
        or (size == 1 != shape(node)[first] and int(number()) != 1)
        or chosen[-1][0] != first + len(chosen) - 1
    ):
        return [*result, (value, mixed(sizes, name))]
    stay = size == shape(node)[first] and (covers > 1 or len(chosen) > 1) and takes_each_row_once(tensor)
    rows = reordered(((size, tag_of(layout[first], name)),), (name, key(tensor)), stay=stay)
    if flat:
        return [*result, (value, ((*rows, *layout[covers]), *layout[covers + 1 :]))]
    return [*result, (value, (*layout[:first], rows, *layout[first + covers :]))]


def copy_slices(
    node: Node, _output: int, layout: Layout, place: Callable[[list[Place]], Place | None] | None = None
) -> Inputs:
    """A part written over, `out[t] = x`: the rest stays where it is, and so do the dimensions of what was written.

    The graph does not say where it was written. It is told by sizes, where only one place fits; or `place` chooses one.
    """
    (base, *values), name, whole = edges(node), operation(node), shape(node)
    result: Inputs = [(base, layout)] if base[0] is not None else []
    for value in values:
        sizes = size_of(value)
        if value[0] is None:
            continue
        every = list(itertools.combinations(range(len(whole)), len(sizes)))
        fits = [dims for dims in every if sizes == tuple(whole[dim] for dim in dims)] or [
            dims for dims in every if all(n <= whole[dim] for n, dim in zip(sizes, dims, strict=True))
        ]
        dims = place(fits) if place is not None else fits[0] if len(fits) == 1 else None
        if dims is None:
            raise refusals.written(name)
        found = [layout[dim] if n == whole[dim] else ((n, name),) for n, dim in zip(sizes, dims, strict=True)]
        result.append((value, tuple(found)))
    return result


def cat(node: Node, _output: int, layout: Layout) -> Inputs:
    """Concatenation: along its dimension each input holds some of the rows."""
    dim = saved_dim(node, "dim", len(layout))
    inputs = [edge for edge in edges(node) if edge[0] is not None and len(size_of(edge)) == len(layout)]
    taken = [size_of(edge)[dim] for edge in inputs]
    own = _own_rows(layout[dim], taken, len(edges(node)))
    rows = [own if own is not None else _some_rows(layout[dim], taken, n) for n in taken]
    return [(edge, with_dim(layout, dim, part)) for edge, part in zip(inputs, rows, strict=True)]


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
    tag = tag_of(dim, "Cat")
    if isinstance(tag, Axis):
        several = sum(part > 1 for part, _ in dim) > 1
        tag = replace(tag.reordered(("Cat", tuple(taken))) if several else tag, lone=size == 1 and len(taken) > 1)
    return ((size, tag),)


def stack(node: Node, _output: int, layout: Layout) -> Inputs:
    """Stacking: the new dimension goes."""
    dim = saved_dim(node, "dim", len(layout))
    return [(edge, layout[:dim] + layout[dim + 1 :]) for edge in edges(node) if edge[0] is not None]


def rows_put_back(stack: Node) -> tuple[set[Node], bool]:
    """Find the unbinds whose results a stack puts back in order; and tell whether it has several results in one row."""
    reached = [_unbinds(edge) for edge in edges(stack)]
    every = {unbind: [each.get(unbind, set[int]()) for each in reached] for each in reached for unbind in each}
    in_order = {
        unbind
        for unbind, places in every.items()
        if results(unbind) == len(places) and all(found == {place} for place, found in enumerate(places))
    }
    return in_order, any(len(found) > 1 for places in every.values() for found in places)


def _unbinds(edge: Edge) -> dict[Node, set[int]]:
    found, seen, stack = dict[Node, set[int]](), set[Edge](), [edge]
    while stack and len(seen) < _OPERATIONS_ON_A_ROW:
        node, place = stack.pop()
        if node is None or (node, place) in seen:
            continue
        seen.add((node, place))
        if operation(node) == "Unbind":
            found.setdefault(node, set()).add(place)
        else:
            stack.extend(edges(node))
    return found


def put_back(layout: Layout, node: Node | None) -> Layout:
    """Rows that an index puts back where it has taken them, a layer in between: `out[index] = expert(x[index])`."""
    puts = {tag.order[-1][1] for dim in layout for _, tag in dim if isinstance(tag, Axis) and tag.order[-1:]}
    for _ in range(_LAYERS if puts else 0):
        if node is None:
            break
        taken = saved_indices(node) if operation(node) == "Index" else (saved_tensor(node, "index"),)
        by = next((by for each in taken if each is not None and (by := key(each)) in puts), None)
        if by is not None:
            return tuple(reordered(dim, (operation(node), by)) for dim in layout)
        node = edges(node)[MATMULS.get(operation(node), (0,))[0]][0] if edges(node) else None
    return layout

"""What choosing rows, and putting rows together, does to samples."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.loss import graph, refusals
from bigbatch.loss.graph import Edge, Shape, edges, operation, saved, saved_dim, saved_tensor, shape, size_of
from bigbatch.loss.layout import PICKED, SHARED, UNBOUND, Axis, Dim, Layout, Tag, Taken, mixed, reshaped, with_dim
from bigbatch.loss.rules import MATMULS, PURE_POINTWISE, RULES, Inputs, Rule, along, known, of_one, pointwise

Place: TypeAlias = tuple[int, ...]  # the dimensions of a tensor that a part of it has
_OPERATIONS_ON_A_ROW = 64
_LAYERS = 32  # operations from rows that an index has taken to where it puts them back
PUTS = frozenset("IndexPut IndexAdd IndexCopy ScatterAdd".split())
TAKES = frozenset("Index IndexSelect Gather".split())


class Source(NamedTuple):
    """A tensor and the dimension along which it was taken apart, row by row."""

    edge: Edge
    dim: int
    rows: int
    unbound: bool  # into all of its rows at once


class Rows(NamedTuple):
    """What rows some parts were made of."""

    back: set[Source]  # the tensors of which each part has one row, in order
    how: tuple[object, ...] | None  # the operations of the first; None where the parts' written numbers differ
    crossed: bool  # a part has rows of different numbers


def rule_of(name: str) -> Rule | None:
    """Return what is known of an operation; the backward of a pointwise operation is pointwise, too."""
    found = RULES.get(name)
    if found is None and name.endswith("Backward") and name.removesuffix("Backward") in PURE_POINTWISE:
        return pointwise
    return found


# Slices, chunks, positions.


def _chunk(layout: Layout, dim: int, size: int, name: str, *, outer: bool = True) -> Layout:
    """Give the layout of a tensor of which an even share along `dim` was taken."""
    part = layout[dim]
    took = math.prod(n for n, _ in part)
    if took == size:
        return layout
    if took == 0 or size % took:
        return with_dim(layout, dim, ((size, name),))
    if part == ((1, PICKED),):
        return with_dim(layout, dim, ((size, PICKED),))
    share = (size // took, SHARED)
    return with_dim(layout, dim, (share, *part) if outer else (*part, share))


@of_one("Slice")
def _slice(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Even shares (`rewards[:n]`, `rewards[n:]`, `x[::2]`) stay apart; other cuts move rows past each other."""
    dim = saved_dim(node, "dim", len(sizes))
    size, took = sizes[dim], shape(node)[dim]
    start, step = graph.signed(saved(node, "start") or 0), saved(node, "step") or 1
    start = max(start + size, 0) if start < 0 else start
    even = took and (start % took == 0 if step == 1 else start < step and took * step == size)
    if took == size or even:
        return _chunk(layout, dim, size, operation(node), outer=step == 1)
    return with_dim(layout, dim, ((size, operation(node)),))


@of_one("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes")
def _split(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Equal chunks stay apart; unequal ones move rows past each other."""
    dim = saved_dim(node, "dim", len(sizes))
    if len({shape(node, n)[dim] for n in range(graph.results(node))}) == 1:
        return _chunk(layout, dim, sizes[dim], operation(node))
    return with_dim(layout, dim, ((sizes[dim], operation(node)),))


@of_one("Select Unbind")
def _select(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """One position along a dimension; of an unbind, all of them should go somewhere."""
    dim = saved_dim(node, "dim", len(sizes))
    tag = PICKED if operation(node) == "Select" else UNBOUND
    return (*layout[:dim], ((sizes[dim], tag),), *layout[dim:])


@of_one("Diagonal")
def _diagonal(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """The diagonal pairs each row with the column of its number."""
    dims = saved_dim(node, "dim1", len(sizes)), saved_dim(node, "dim2", len(sizes))
    rest = iter(layout[:-1])
    tag = _tag_of(layout[-1], operation(node)) if sizes[dims[0]] == sizes[dims[1]] else operation(node)
    return tuple(((size, tag),) if d in dims else next(rest) for d, size in enumerate(sizes))


@of_one("AsStrided")
def _as_strided(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Windows over a signal, as `stft` takes them: outer dimensions that are left alone stay, the rest is mixed."""
    size, stride = saved(node, "size"), saved(node, "stride")
    kept = 0
    while kept < len(sizes) and size[kept : kept + 1] == sizes[kept : kept + 1]:
        if stride[kept] != math.prod(sizes[kept + 1 :]):  # of a tensor that lies in one piece
            break
        kept += 1
    steps = sum((n - 1) * m for n, m in zip(size[kept:], stride[kept:], strict=True))
    if (saved(node, "storage_offset") or 0) + steps >= math.prod(sizes[kept:]):
        kept = 0
    return (*layout[:kept], *mixed(sizes[kept:], operation(node)))


# Rows by a mask or by numbers, taken and put back.


def _key(by: Tensor) -> object:
    """Tell an index from others by its memory."""
    by = by if by.dim() else by[None]
    return by.data_ptr(), by.shape, by.stride()


def _reordered(dim: Dim, by: tuple[str, object], *, stay: bool = False) -> Dim:
    """Return rows as they lie behind an index; taken by the one that they are put back by, they lie where they were.

    `stay`: the index takes all of them in their order.
    """

    def back(axis: Axis) -> Axis:
        taken = any(put in PUTS and to == by[1] for put, to in axis.order[-1:])
        return (
            replace(axis, order=axis.order[:-1]) if taken else axis if stay else replace(axis, order=(*axis.order, by))
        )

    return tuple((size, back(tag) if isinstance(tag, Axis) else tag) for size, tag in dim)


def _tag_of(dim: Dim, name: str) -> Tag:
    """Return what the rows of a glued dimension are once they were put in another order: apart, or mixed by `name`."""
    parts = [(size, tag) for size, tag in dim if size > 1] or list(dim)
    if not parts:
        return PICKED
    apart = len(parts) == 1 or all(isinstance(tag, Axis) for _, tag in parts)
    return parts[0][1] if apart else name


def _takes_each_row_once(by: Tensor) -> bool:
    """Whether an index takes one value of each row, in their order: `x[arange(n), labels]`, `x[labels_one_hot == 1]`.

    A mask has made its device wait already, in the forward; numbers on a device are not looked at.
    """
    if by.dtype == torch.bool:
        return by.dim() > 1 and bool((by.flatten(1).sum(1) == 1).all())
    return by.is_cpu and torch.equal(by, torch.arange(len(by), dtype=by.dtype))


@of_one("Index")
def _index(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Rows chosen by a mask or by numbers: still rows, but no longer beside the rows they lay beside."""
    name, chosen = operation(node), [(d, i) for d, i in enumerate(graph.saved_indices(node)) if i is not None]
    if not chosen or [d for d, _ in chosen] != list(range(chosen[0][0], chosen[0][0] + len(chosen))):
        return mixed(sizes, name)
    first, tensor = chosen[0]
    covers = tensor.dim() if tensor.dtype == torch.bool else 1
    if covers == 1 and tensor.dim() != 1:
        return mixed(sizes, name)
    several = covers > 1 or len(chosen) > 1  # dimensions that one number or truth value chooses from
    rows = layout[first]
    taken = math.prod(n for n, _ in rows)
    if taken > (sizes[first] if len(chosen) > 1 or covers == 1 else taken):  # some rows were taken twice
        return mixed(sizes, name) if several else with_dim(layout, first, ((sizes[first], name),))
    stay = taken == sizes[first] and _takes_each_row_once(tensor)
    head = _reordered(((sizes[first], _tag_of(rows, name)),), (name, _key(tensor)), stay=stay)
    picked: Layout = tuple(((size, PICKED),) for size in sizes[first + 1 : first + covers + len(chosen) - 1])
    return (*layout[:first], head, *picked, *layout[first + 1 :])


@of_one("MaskedSelect")
def _masked_select(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Elements chosen by a mask, outermost dimension first."""
    name, mask = operation(node), saved_tensor(node, "mask")
    by = (name, _key(mask) if mask is not None else None)
    return (_reordered(((sizes[0], _tag_of(layout[0], name)),), by), *(((size, PICKED),) for size in sizes[1:]))


def rows_index(node: Node) -> Tensor | None:
    """Return the numbers of whole rows that an operation along one dimension takes or puts; None where it does not."""
    by, edge = saved_tensor(node, "index"), edges(node)[-1]
    if by is None or by.dim() < 2 or edge[0] is None:  # noqa: PLR2004
        return by[None] if by is not None and not by.dim() else by
    dim, rest = saved_dim(node, "dim", by.dim()), list(zip(by.shape, size_of(edge), by.stride(), strict=True))
    del rest[dim]
    expanded = all(n == m and (n == 1 or step == 0) for n, m, step in rest)
    return by.movedim(dim, 0).as_strided(by.shape[dim : dim + 1], (by.stride(dim),)) if expanded else None


def _along_rows(node: Node, layout: Layout, sizes: Shape) -> Layout | None:
    """Return the layout of rows that an index takes, or of those that it puts, `sizes` in all; None of other things."""
    by, name, dim = rows_index(node), operation(node), saved_dim(node, "dim", len(sizes))
    if by is None or (name not in PUTS and len(by) > sizes[dim]) or (name == "Gather" and len(sizes) == 1):
        return None
    return with_dim(layout, dim, _reordered(((sizes[dim], _tag_of(layout[dim], name)),), (name, _key(by))))


@known("IndexSelect Gather")
def _take_rows(node: Node, output: int, layout: Layout) -> Inputs:
    """Rows chosen by numbers along one dimension, or single elements of them."""
    edge = edges(node)[0]
    rows = _along_rows(node, layout, size_of(edge))
    return along(node, output, layout) if rows is None else [(edge, rows)]


@known("IndexAdd IndexCopy ScatterAdd")
def _put_rows(node: Node, output: int, layout: Layout) -> Inputs:
    """Rows added or copied to where an index says; those that it puts them into are such themselves, or mixed."""
    mixing: Inputs = along(node, output, layout)
    (base, mixed_base), (source, _) = mixing
    rows = _along_rows(node, layout, size_of(source)) if source[0] is not None else None
    if rows is None:
        return mixing
    return [(base, layout if base[0] is not None and operation(base[0]) in PUTS else mixed_base), (source, rows)]


@known("IndexPut")
def _index_put(node: Node, _output: int, layout: Layout) -> Inputs:
    """Values put in the places of others, which stay where they are; `index` by the same index takes them back."""
    (edge, value, *_), name, whole = edges(node), operation(node), shape(node)
    chosen = [(d, i) for d, i in enumerate(graph.saved_indices(node)) if i is not None]
    filled = edge[0] is not None and operation(edge[0]) in PUTS  # one of several that fill a tensor
    by_number = {
        d
        for d, i in chosen[:1]
        if i.dtype != torch.bool and (len(chosen) == 1 or (i.is_cpu and not _takes_each_row_once(i)))
    }
    kept = tuple(((whole[d], name),) if d in by_number and not filled else dim for d, dim in enumerate(layout))
    result: Inputs = [(edge, kept)] if edge[0] is not None else []
    if value[0] is None:
        return result
    sizes = size_of(value)
    if not chosen or saved(node, "accumulate"):
        return [*result, (value, mixed(sizes, name))]
    first, tensor = chosen[0]
    is_mask = tensor.dtype == torch.bool
    covers = tensor.dim() if is_mask else len(chosen)
    flat = not first and 0 < len(sizes) == len(layout) - covers  # of one row torch leaves its own dimension out
    size = 1 if flat else sizes[first] if first < len(sizes) else 0
    if (
        (not is_mask and tensor.dim() != 1)
        or (not flat and covers + len(sizes) - 1 != len(layout))
        or (size == 1 != whole[first] and int(tensor.sum() if is_mask else tensor.numel()) != 1)
        or chosen[-1][0] != first + len(chosen) - 1
    ):
        return [*result, (value, mixed(sizes, name))]
    stay = size == whole[first] and (covers > 1 or len(chosen) > 1) and _takes_each_row_once(tensor)
    rows = _reordered(((size, _tag_of(layout[first], name)),), (name, _key(tensor)), stay=stay)
    if flat:
        return [*result, (value, ((*rows, *layout[covers]), *layout[covers + 1 :]))]
    return [*result, (value, (*layout[:first], rows, *layout[first + covers :]))]


def put_back(layout: Layout, node: Node | None) -> Layout:
    """Rows that an index puts back where it has taken them, a layer in between: `out[index] = expert(x[index])`."""
    puts = {tag.order[-1][1] for dim in layout for _, tag in dim if isinstance(tag, Axis) and tag.order[-1:]}
    for _ in range(_LAYERS if puts else 0):
        if node is None:
            break
        taken = graph.saved_indices(node) if operation(node) == "Index" else (saved_tensor(node, "index"),)
        by = next((by for each in taken if each is not None and (by := _key(each)) in puts), None)
        if by is not None:
            return tuple(_reordered(dim, (operation(node), by)) for dim in layout)
        node = edges(node)[MATMULS.get(operation(node), (0,))[0]][0] if edges(node) else None
    return layout


# Parts written over, rows one behind the other.


@known("CopySlices")
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


@known("Cat")
def _cat(node: Node, _output: int, layout: Layout) -> Inputs:
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
    parts = tuple((size, tag) for size, tag in dim if size > 1)
    size = taken[0] if taken else 0
    if set(taken) != {size} or size * inputs != math.prod(n for n, _ in dim) or len(taken) < inputs - 1:
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
    tag = _tag_of(dim, "Cat")
    if isinstance(tag, Axis):
        several = sum(part > 1 for part, _ in dim) > 1
        order = (*tag.order, ("Cat", tuple(taken))) if several else tag.order
        tag = replace(tag, order=order, lone=size == 1 and len(taken) > 1)
    return ((size, tag),)


def row_of(node: Node | None, output: int) -> tuple[Source, int] | None:
    """Tell of which tensor a result is one row, and the row's number."""
    if node is None or (name := operation(node)) not in {"Unbind", "Select"}:
        return None
    edge = edges(node)[0]
    dim = saved_dim(node, "dim", len(size_of(edge)))
    rows = size_of(edge)[dim]
    number = output if name == "Unbind" else graph.signed(saved(node, "index")) % rows
    return Source(edge, dim, rows, name == "Unbind"), number


def rows_put_back(parts: Sequence[Edge]) -> Rows:
    """Find the tensors of which each of these parts has one row, in order.

    Rows that were taken by number, one by one, may be some that stand for themselves, where the parts are not alike.
    """
    rows, operations, numbers = zip(*map(rows_below, parts), strict=True)
    found = {source: [each.get(source, set()) for each in rows] for part in rows for source in part}
    alike = len(set(operations)) == 1
    back = {
        source
        for source, places in found.items()
        if source.rows == len(parts) and all(each == {at} for at, each in enumerate(places))
        if alike or source.unbound
    }
    unbound = [(source, places) for source, places in found.items() if source.unbound and sum(map(bool, places)) > 1]
    together = [
        {row for source, places in unbound if source.rows == rows for row in places[at]}
        for rows in {source.rows for source, _ in unbound}
        for at in range(len(parts))
    ]
    how = operations[0] if len(set(numbers)) == 1 else None
    return Rows(back, how, any(len(each) > 1 for each in together))


def rows_below(edge: Edge) -> tuple[dict[Source, set[int]], tuple[object, ...], tuple[float, ...]]:
    """Return the rows that something was made of, by which operations, and with which written numbers."""
    rows, operations, numbers = dict[Source, set[int]](), list[object](), list[float]()
    stack, seen = [edge], set[Edge]()
    while stack and len(seen) < _OPERATIONS_ON_A_ROW:
        node, place = stack.pop(0)
        if node is None or (node, place) in seen:
            continue
        seen.add((node, place))
        name = operation(node)
        operations += type(node), graph.python_number(node, "exponent") if name == "Pow" else None
        number = graph.python_number(node, "other") if name in {"Mul", "Div"} else saved(node, "alpha")
        numbers += [number] if number is not None else []
        row = row_of(node, place)
        if row is not None:
            rows.setdefault(row[0], set()).add(row[1])
        if row is None or not row[0].unbound or row_of(*row[0].edge) is not None:
            stack.extend(edges(node))
    return rows, tuple(operations), tuple(numbers)

"""What choosing rows does to samples: slices, chunks, positions, masks, indices."""

import math
from dataclasses import replace

import torch
from torch.autograd.graph import Node

from bigbatch.loss.graph import (
    Shape,
    edges,
    operation,
    saved,
    saved_dim,
    saved_indices,
    saved_tensor,
    shape,
    signed,
)
from bigbatch.loss.layout import PICKED, SHARED, UNBOUND, Axis, Dim, Layout, Tag, mixed
from bigbatch.loss.rules import Inputs, along, of_one, size_of


def with_dim(layout: Layout, dim: int, to: Dim) -> Layout:
    """Return the layout with another dimension in the place of one."""
    return (*layout[:dim], to, *layout[dim + 1 :])


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


@of_one
def take_slice(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Even shares (`rewards[:n]`, `rewards[n:]`, `x[::2]`) stay apart; other cuts move rows past each other."""
    dim = saved_dim(node, "dim", len(sizes))
    size, took = sizes[dim], shape(node, 0)[dim]
    start, step = signed(saved(node, "start") or 0), saved(node, "step") or 1
    start = max(start + size, 0) if start < 0 else start
    even = took and (start % took == 0 if step == 1 else start < step and took * step == size)
    if took == size or even:
        return _chunk(layout, dim, size, operation(node), outer=step == 1)
    return with_dim(layout, dim, ((size, operation(node)),))


@of_one
def split(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Equal chunks stay apart; unequal ones move rows past each other."""
    dim = saved_dim(node, "dim", len(sizes))
    if len({shape(node, n)[dim] for n in range(results(node))}) == 1:
        return _chunk(layout, dim, sizes[dim], operation(node))
    return with_dim(layout, dim, ((sizes[dim], operation(node)),))


@of_one
def select(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """One position along a dimension; of an unbind, all of them should go somewhere."""
    dim = saved_dim(node, "dim", len(sizes))
    tag = PICKED if operation(node) == "Select" else UNBOUND
    return (*layout[:dim], ((sizes[dim], tag),), *layout[dim:])


def results(node: Node) -> int:
    """Return how many results an operation has."""
    metadata: object = getattr(node, "_input_metadata", ())
    return len(metadata) if isinstance(metadata, list | tuple) else 1


PUTS = frozenset("IndexPut IndexAdd IndexCopy ScatterAdd".split())


def key(by: torch.Tensor) -> object:
    """Tell an index from others by its memory."""
    by = by if by.dim() else by[None]
    return by.data_ptr(), by.shape, by.stride()


def reordered(dim: Dim, by: tuple[str, object], *, stay: bool = False) -> Dim:
    """Return rows as they lie behind an index; taken by the one that they are put back by, they lie where they were.

    `stay`: the index takes all of them in their order.
    """

    def back(axis: Axis) -> Axis:
        taken = any(put in PUTS and to == by[1] for put, to in axis.order[-1:])
        return replace(axis, order=axis.order[:-1]) if taken else axis if stay else axis.reordered(by)

    return tuple((size, back(tag) if isinstance(tag, Axis) else tag) for size, tag in dim)


def tag_of(dim: Dim, name: str) -> Tag:
    """Return what the rows of a glued dimension are once they were put in another order: apart, or mixed by `name`."""
    parts = [(size, tag) for size, tag in dim if size > 1] or list(dim)
    if not parts:
        return PICKED
    apart = len(parts) == 1 or all(isinstance(tag, Axis) for _, tag in parts)
    return parts[0][1] if apart else name


@of_one
def index(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Rows chosen by a mask or by numbers: still rows, but no longer beside the rows they lay beside."""
    name, chosen = operation(node), [(d, i) for d, i in enumerate(saved_indices(node)) if i is not None]
    if not chosen or [d for d, _ in chosen] != list(range(chosen[0][0], chosen[0][0] + len(chosen))):
        return mixed(sizes, name)
    first, tensor = chosen[0]
    covers = tensor.dim() if tensor.dtype == torch.bool else 1
    if covers == 1 and tensor.dim() != 1:
        return mixed(sizes, name)
    several = covers > 1 or len(chosen) > 1  # dimensions that one number or truth value chooses from
    rows = layout[first]
    taken = math.prod(n for n, _ in rows)
    covered = sizes[first] if len(chosen) > 1 or covers == 1 else taken
    if taken > covered:  # some rows were taken twice
        return mixed(sizes, name) if several else with_dim(layout, first, ((sizes[first], name),))
    stay = taken == sizes[first] and takes_each_row_once(tensor)
    head = reordered(((sizes[first], tag_of(rows, name)),), (name, key(tensor)), stay=stay)
    picked: Layout = tuple(((size, PICKED),) for size in sizes[first + 1 : first + covers + len(chosen) - 1])
    return (*layout[:first], head, *picked, *layout[first + 1 :])


def takes_each_row_once(by: torch.Tensor) -> bool:
    """Whether an index takes one value of each row, in their order: `x[arange(n), labels]`, `x[labels_one_hot == 1]`.

    A mask has made its device wait already, in the forward; numbers on a device are not looked at.
    """
    if by.dtype == torch.bool:
        return by.dim() > 1 and bool((by.flatten(1).sum(1) == 1).all())
    return by.is_cpu and torch.equal(by, torch.arange(len(by), dtype=by.dtype))


def rows_index(node: Node) -> torch.Tensor | None:
    """Return the numbers of whole rows that an operation along one dimension takes or puts; None where it does not."""
    by, edge = saved_tensor(node, "index"), edges(node)[-1]
    if by is None or by.dim() < 2 or edge[0] is None:  # noqa: PLR2004
        return by[None] if by is not None and not by.dim() else by
    dim, rest = saved_dim(node, "dim", by.dim()), list(zip(by.shape, size_of(edge), by.stride(), strict=True))
    del rest[dim]
    expanded = all(n == m and (n == 1 or step == 0) for n, m, step in rest)
    return by.movedim(dim, 0).as_strided(by.shape[dim : dim + 1], (by.stride(dim),)) if expanded else None


def along_rows(node: Node, layout: Layout, sizes: tuple[int, ...]) -> Layout | None:
    """Return the layout of rows that an index takes, or of those that it puts, `sizes` in all; None of other things."""
    by, name, dim = rows_index(node), operation(node), saved_dim(node, "dim", len(sizes))
    if by is None or (name not in PUTS and len(by) > sizes[dim]) or (name == "Gather" and len(sizes) == 1):
        return None
    return with_dim(layout, dim, reordered(((sizes[dim], tag_of(layout[dim], name)),), (name, key(by))))


def index_select(node: Node, output: int, layout: Layout) -> Inputs:
    """Rows chosen by numbers along one dimension, or single elements of them."""
    edge = edges(node)[0]
    rows = along_rows(node, layout, size_of(edge))
    return along(node, output, layout) if rows is None else [(edge, rows)]


@of_one
def as_strided(node: Node, layout: Layout, sizes: Shape) -> Layout:
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


@of_one
def masked_select(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Elements chosen by a mask, outermost dimension first."""
    name, mask = operation(node), saved_tensor(node, "mask")
    by = (name, key(mask) if mask is not None else None)
    rows = reordered(((sizes[0], tag_of(layout[0], name)),), by)
    return (rows, *(((size, PICKED),) for size in sizes[1:]))


@of_one
def diagonal(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """The diagonal pairs each row with the column of its number."""
    dims = saved_dim(node, "dim1", len(sizes)), saved_dim(node, "dim2", len(sizes))
    rest = iter(layout[:-1])
    tag = tag_of(layout[-1], operation(node)) if sizes[dims[0]] == sizes[dims[1]] else operation(node)
    return tuple(((size, tag),) if d in dims else next(rest) for d, size in enumerate(sizes))

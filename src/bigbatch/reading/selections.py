"""What choosing rows does to samples: slices, chunks, positions, masks, indices; writing and putting rows together."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.reading.graph import edges, operation, saved, saved_dim, saved_tensor, shape, signed
from bigbatch.reading.layout import (
    PICKED,
    SHARED,
    Axis,
    Dim,
    Layout,
    Rows,
    Tag,
    Taken,
    Unclear,
    broadcast,
    is_whole,
    mixed,
    reshaped,
)
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


def _untold(node: Node) -> Inputs:
    """Say that rows may have gone anywhere: what they went by does not tell."""
    return [(edge, mixed(size_of(edge), Unclear(operation(node)))) for edge in edges(node)]


def _indices(node: Node) -> list[tuple[int, Tensor]] | None:
    """Give the indices and masks of an operation, each with the dimension at which it begins; None where guarded."""
    if getattr(node, "_raw_saved_indices", None) is None:
        return None
    found, dim = list[tuple[int, Tensor]](), 0
    for each in saved(node, "indices"):
        if each is not None and each.dtype == torch.uint8:  # a mask, of old
            return None
        if each is not None:
            found.append((dim, each))
        dim += each.dim() if each is not None and each.dtype == torch.bool else 1
    return found


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
    chosen = _indices(node)
    if not chosen or not _side_by_side(chosen):
        return _untold(node)
    first, tensor = chosen[0]
    covers = tensor.dim() if tensor.dtype == torch.bool else 1
    if covers == 1 and tensor.dim() != 1:
        return _untold(node)
    rows = layout[first]
    taken = math.prod(n for n, _ in rows)
    covered = sizes[first] if len(chosen) > 1 or covers == 1 else taken
    if taken > covered:  # some rows were taken twice
        return everything(node, 0, layout)
    by = Rows(tensor)
    head: Dim = _taken_back(((sizes[first], _tag(rows, name)),), by) or _reordered(
        ((sizes[first], _tag(rows, name)),), (name, by)
    )
    picked: Layout = tuple(((size, PICKED),) for size in sizes[first + 1 : first + covers + len(chosen) - 1])
    return [(edge, (*layout[:first], head, *picked, *layout[first + 1 :]))]


def _side_by_side(chosen: list[tuple[int, Tensor]]) -> bool:
    """Tell whether indices are of dimensions one after the other, no mask behind the first; torch moves the others."""
    return all(index.dtype != torch.bool for _, index in chosen[1:]) and all(
        later == dim + (index.dim() if index.dtype == torch.bool else 1)
        for (dim, index), (later, _) in zip(chosen, chosen[1:], strict=False)
    )


def _taken_back(dim: Dim, by: Rows) -> Dim | None:
    """Give rows that are written back to where they were taken from, `x[mask] = f(x[mask])`: they are where they were."""
    if not all(isinstance(tag, Axis) and tag.order and tag.order[-1] == (_WRITTEN, by) for _, tag in dim):
        return None
    return tuple((size, replace(tag, order=tag.order[:-1]) if isinstance(tag, Axis) else tag) for size, tag in dim)


_WRITTEN = "IndexPut"


def index_put(node: Node, _output: int, layout: Layout) -> Inputs:
    """Values written by index: into rows of their own, where every row is written to in its order, or by a mask.

    What is not written to stays where it was. A dimension that some numbers were chosen of is not the samples', or it
    would matter where in its micro-batch a sample lies.
    """
    name, (into, values) = operation(node), edges(node)[:2]
    chosen = _indices(node)
    if not chosen or not _side_by_side(chosen):
        return _untold(node)
    sizes = shape(node)
    first, (last, end) = chosen[0][0], chosen[-1]
    last += end.dim() if end.dtype == torch.bool else 1
    if chosen[0][1].dtype == torch.bool:
        apart, head = _by_mask(chosen, layout, size_of(values), len(sizes) - last)
    else:
        apart, head = _by_numbers(chosen, layout, sizes)
    kept = tuple(
        dim if d < first or d >= last or d in apart else ((sizes[d], Unclear(name)),) for d, dim in enumerate(layout)
    )
    written = (*layout[:first], *head, *layout[last:])
    found: Inputs = [(into, kept if into[0] is not None else ())]
    if values[0] is not None:
        lengths = tuple(math.prod(size for size, _ in dim) for dim in written)
        below = broadcast(written, size_of(values), lengths, name)
        missing = len(written) - len(below)
        if below and missing and set(lengths[:missing]) == {1}:  # torch drops them from a value: a batch of one
            below = (tuple(part for dim in written[: missing + 1] for part in dim), *below[1:])
        found.append((values, below))
    return found


def _by_mask(
    chosen: list[tuple[int, Tensor]], layout: Layout, given: tuple[int, ...], rest: int
) -> tuple[set[int], Layout]:
    """Give the dimensions that keep their rows apart, and what the rows of the values are."""
    first, mask = chosen[0]
    apart = set(range(first, first + mask.dim()))
    number = given[-rest - 1] if len(given) > rest else 1
    if number == 1:  # one row, or one for all
        number = int(mask.sum())
    rows: Dim = ((number, _tag(layout[first], _WRITTEN)),)
    return apart, (_reordered(rows, (_WRITTEN, Rows(mask))),)


def _by_numbers(
    chosen: list[tuple[int, Tensor]], layout: Layout, sizes: tuple[int, ...]
) -> tuple[set[int], Layout]:
    """Give the dimension whose rows are all written to in their order, and what the rows of the values are."""
    out = torch.broadcast_shapes(*(index.shape for _, index in chosen))
    everywhere = [
        (dim, index)
        for dim, index in chosen
        if index.dtype != torch.bool
        and len(index.shape) == len(out) > 0
        and index.numel() == len(index) == out[0]
        and is_whole(index.flatten(), sizes[dim])
    ]
    mixes: Layout = tuple(((size, Unclear(_WRITTEN)),) for size in out)
    if not everywhere:
        return set(), mixes
    dim, rows = everywhere[0]
    by = Rows(rows, in_order=True)
    if any(by == Rows(index) for other, index in chosen if other != dim):
        return set(), mixes  # a diagonal: what is written to goes by where in its micro-batch a sample lies
    return {dim}, (_reordered(layout[dim], (_WRITTEN, by)), *mixes[1:])


def index_select(node: Node, _output: int, layout: Layout) -> Inputs:
    """Rows chosen by numbers along one dimension."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    dim = saved_dim(node, "dim", len(sizes))
    by = saved_tensor(node, "index")
    if by is None or by.numel() > sizes[dim]:
        return [(edge, (*layout[:dim], ((sizes[dim], name),), *layout[dim + 1 :]))]
    rows = _reordered(((sizes[dim], _tag(layout[dim], name)),), (name, Rows(by)))
    return [(edge, (*layout[:dim], rows, *layout[dim + 1 :]))]


def masked_select(node: Node, _output: int, layout: Layout) -> Inputs:
    """Elements chosen by a mask, outermost dimension first."""
    edge = only_input(node)
    sizes = size_of(edge)
    mask = saved_tensor(node, "mask")
    by = (operation(node), Rows(mask) if mask is not None else None)
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

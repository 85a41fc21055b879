"""What writing by index does to samples: a margin at each sample's own class, a mask over a row."""

import math

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.reading.graph import Edge, edges, operation, shape
from bigbatch.reading.layout import Dim, Layout, Rows, Unclear, broadcast, is_whole
from bigbatch.reading.rules import Inputs, size_of
from bigbatch.reading.selections import WRITTEN, indices_of, reordered, side_by_side, tag_of, untold


def index_put(node: Node, _output: int, layout: Layout) -> Inputs:
    """Values written by index: into rows of their own, where every row is written to in its order, or by a mask.

    What is not written to stays where it was. A dimension that some numbers were chosen of is not the samples', or it
    would matter where in its micro-batch a sample lies.
    """
    name, into, values = operation(node), edges(node)[0], _as_given(edges(node)[1])
    chosen = indices_of(node)
    if not chosen or not side_by_side(chosen):
        return untold(node)
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
        found.append((values, broadcast(written, size_of(values), lengths, name)))
    return found


def _as_given(edge: Edge) -> Edge:
    """Go back to values as they were: torch drops leading dimensions of size 1, and they may be one sample's row."""
    node, output = edge
    while node is not None and operation(node) == "View":
        below, place = edges(node)[0]
        before, after = size_of((below, place)), shape(node, output)
        if below is None or before == after or before != (1,) * (len(before) - len(after)) + after:
            break
        node, output = below, place
    return node, output


def _by_mask(
    chosen: list[tuple[int, Tensor]], layout: Layout, given: tuple[int, ...], rest: int
) -> tuple[set[int], Layout]:
    """Give the dimensions that keep their rows apart, and what the rows of the values are."""
    first, mask = chosen[0]
    apart = set(range(first, first + mask.dim()))
    number = given[-rest - 1] if len(given) > rest else 1
    if given and number == 1:  # one row, or one for all
        number = int(mask.sum())
    rows: Dim = ((number, tag_of(layout[first], WRITTEN)),)
    return apart, (reordered(rows, (WRITTEN, Rows(mask))),)


def _by_numbers(chosen: list[tuple[int, Tensor]], layout: Layout, sizes: tuple[int, ...]) -> tuple[set[int], Layout]:
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
    mixes: Layout = tuple(((size, Unclear(WRITTEN)),) for size in out)
    if not everywhere:
        return set(), mixes
    dim, rows = everywhere[0]
    by = Rows(rows, in_order=True)
    if any(by == Rows(index) for other, index in chosen if other != dim):
        return set(), mixes  # a diagonal: what is written to goes by where in its micro-batch a sample lies
    return {dim}, (reordered(layout[dim], (WRITTEN, by)), *mixes[1:])

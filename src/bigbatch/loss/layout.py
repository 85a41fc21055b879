"""Where a term's samples lie in a tensor, followed from the reduction down towards the model.

A layout says of every dimension of a tensor what became of it on the way up to the loss. Reshapes glue dimensions
together and cut them apart, so a dimension is a row of parts, outermost first, and a part is one of five things:

    Axis     it reaches the reduction with its positions apart: samples may lie along it
    SHARED   an even share of it came this way (`rewards[:n]` and `rewards[n:]`): samples lie behind it
    UNBOUND  each position went a way of its own (`for row in output`): samples may lie along it, if all came this way
    PICKED   one position was chosen and the others left out (`hidden[:, 0]`): samples must not lie along it
    "Mm"     the operation of that name mixed its positions: samples must not lie along it
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, TypeAlias

from bigbatch.loss.graph import Shape


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension that a reduction averaged or summed last of all, or a piece of it.

    Two branches of a loss hold the same samples side by side only where their axes `match`.
    """

    reduction: int
    dim: int
    order: tuple[tuple[str, object], ...] = ()  # the operation and the index or mask its rows were taken by
    path: tuple[tuple[int, int, int], ...] = ()  # which piece of it, where a reshape cut it
    lone: bool = False  # rows of several inputs that have but one each: a batch of one, or one sample after the other

    def piece(self, outer: int, inner: int, which: int) -> "Axis":
        """Return the outer (0) or inner (1) piece after a cut into outer x inner."""
        return replace(self, path=(*self.path, (outer, inner, which)))

    def matches(self, other: "Axis") -> bool:
        """Tell whether one is the other or a piece of it."""
        if (self.reduction, self.dim, self.order) != (other.reduction, other.dim, other.order):
            return False
        return all(a == b for a, b in zip(self.path, other.path, strict=False))


class Taken(Enum):
    """A dimension of which not all came this way."""

    SHARED = auto()
    PICKED = auto()
    UNBOUND = auto()


SHARED: Final = Taken.SHARED
PICKED: Final = Taken.PICKED
UNBOUND: Final = Taken.UNBOUND

Tag: TypeAlias = Axis | Taken | str
Part: TypeAlias = tuple[int, Tag]
Dim: TypeAlias = tuple[Part, ...]
Layout: TypeAlias = tuple[Dim, ...]


def matches(tag: Tag, other: Tag) -> bool:
    """Tell whether two parts are the same axis, or pieces of it."""
    return isinstance(tag, Axis) and isinstance(other, Axis) and tag.matches(other)


def mixed(sizes: Shape, by: str) -> Layout:
    """Return a layout in which an operation has mixed everything."""
    return tuple(((size, by),) for size in sizes)


def mix(layout: Layout, sizes: Shape, dims: Collection[int], by: str) -> Layout:
    """Return a layout in which an operation has mixed some dimensions."""
    return tuple(((size, by),) if dim in dims else layout[dim] for dim, size in enumerate(sizes))


def with_dim(layout: Layout, dim: int, to: Dim) -> Layout:
    """Return the layout with another dimension in the place of one."""
    return (*layout[:dim], to, *layout[dim + 1 :])


def without_dim(layout: Layout, dim: int) -> Layout:
    """Return the layout without one dimension."""
    return layout[:dim] + layout[dim + 1 :]


def broadcast(layout: Layout, sizes: Shape, out: Shape, by: str) -> Layout:
    """Return the layout of an input that was broadcast from `sizes` to `out`."""
    skip = len(out) - len(sizes)
    if skip == 0 and sizes == out:
        return layout
    return tuple(((1, by),) if size == 1 and out[skip + i] != 1 else layout[skip + i] for i, size in enumerate(sizes))


def without_slivers(layout: Layout) -> Layout:
    """Return a layout whose dimensions of 1 hold no samples, where they were cut off those: `x.view(1, n, c)`."""
    return tuple(
        ((1, PICKED),) if len(dim) == 1 and dim[0][0] == 1 and isinstance(tag := dim[0][1], Axis) and tag.path else dim
        for dim in layout
    )


def is_sliver(axis: Axis) -> bool:
    """Tell a piece of size 1 that a reshape has put before an axis: `x.view(n, 1, c)`."""
    return bool(axis.path) and axis.path[-1][0] == 1 and axis.path[-1][2] == 0


def reshaped(layout: Layout, sizes: Shape, by: str) -> Layout:
    """Return the layout before a reshape: the same parts, cut and glued to fit `sizes`."""
    parts = [part for dim in layout for part in dim][::-1]
    pending = list(parts)
    if 0 in sizes or any(size == 0 for size, _ in pending):  # nothing there to follow
        return mixed(sizes, by)
    # A batch of one among the rows of a linear layer: its reshapes leave the last dimension alone.
    rows = len(layout) > 1 < len(sizes) and math.prod(size for size, _ in layout[-1]) == sizes[-1]
    result: list[Dim] = []
    whole = True
    for size in sizes:
        dim = _unit(pending) if size == 1 else _fill(size, pending, rows=rows)
        if dim is None:  # cuts that do not meet; what lies before them is as it was, where no part of it is cut
            kept = result if whole else []
            return (*kept, *mixed(sizes[len(kept) :], by))
        whole = pending == parts[: len(pending)]
        result.append(dim)
    return tuple(result)


def _unit(pending: list[Part]) -> Dim:
    """Take a dimension of size 1: one that was there, or the outermost sliver of what comes next."""
    if not pending:
        return ((1, PICKED),)
    if pending[-1][0] == 1:
        return (pending.pop(),)
    size, tag = pending[-1]
    return ((1, tag.piece(1, size, 0) if isinstance(tag, Axis) else tag),)


def _fill(size: int, pending: list[Part], *, rows: bool) -> Dim | None:
    """Take parts until they make up `size`, cutting the last one; None where the cuts do not meet."""
    parts: list[Part] = []
    while size > 1:
        if not pending:
            return None
        part, tag = pending.pop()
        if part == 1 and (isinstance(tag, Taken) or (isinstance(tag, str) and not parts and not rows)):
            continue
        if part == 1 and isinstance(tag, Axis) and not rows:
            tag = replace(tag, lone=True)
        if size % part == 0:
            parts.append((part, tag))
            size //= part
        elif part % size == 0:
            rest = part // size
            outer, inner = (tag.piece(size, rest, 0), tag.piece(size, rest, 1)) if isinstance(tag, Axis) else (tag, tag)
            parts.append((size, outer))
            pending.append((rest, inner))
            size = 1
        else:
            return None
    for one, tag in reversed(pending):  # a batch of one in the middle belongs to either side
        if one != 1:
            break
        if isinstance(tag, str) or (rows and isinstance(tag, Axis)):  # what was broadcast has met all the others
            parts.append((1, tag))
    return tuple(parts)


def sample_axes(
    layout: Layout, dims: tuple[int, ...], one_sample: Callable[[int], bool] = lambda size: size > 1
) -> tuple[Axis, ...] | str:
    """Say along which axes the samples of a model's output lie, given the dimensions that may hold them.

    The outermost part is taken to be the samples' (batch first). Answers the axes, outermost first (none where a single
    sample was picked), or the name of the operation that mixed the samples or left some out. Rows that were seen as one
    may be one sample, or all of them: `one_sample` is told how many were seen, and says which.
    """
    found: list[Axis] = []
    for dim in dims:
        parts = layout[dim]
        rows, lone = next(((size, tag.lone) for size, tag in parts if isinstance(tag, Axis)), (0, False))
        glued = rows > 0 and not found and sum(size > 1 for size, _ in parts) > (rows > 1)
        if glued and not one_sample(rows) and rows == 1 and lone:
            parts = tuple(part for part in parts if part[0] > 1 or isinstance(part[1], str))
        for size, tag in parts:
            if isinstance(tag, Axis):
                found.append(tag)
            elif isinstance(tag, str) and not found:
                return tag
            elif tag is PICKED and size > 1 and not found:
                return "Select"
    some = any(tag is SHARED and size > 1 for dim in dims for size, tag in layout[dim])
    return "Slice" if some and not found else tuple(found)

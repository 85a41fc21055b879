"""Broadcasting: does a tensor without gradient set samples against each other, as (n, 1) with (n,) gives (n, n)?"""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.autograd.graph import Node

from bigbatch.loss.graph import Shape, edges, saved_tensor
from bigbatch.loss.layout import Axis, Dim, Layout, Part, matches
from bigbatch.loss.operations import MASKED_POINTWISE, rule_of
from bigbatch.loss.rules import fused_loss, size_of
from bigbatch.loss.trail import Trail

_HIDDEN = {"Where": "condition", "MaskedFill": "mask"}


class _Spread(NamedTuple):
    """A dimension of a result that an operand without gradient may have made, or lies along."""

    name: str
    dim: Dim
    beside: Layout  # the dimensions that the operand has, where they are known
    direct: bool  # the operands with gradient were repeated along it


@dataclass
class Broadcasts:
    """What was broadcast below a reduction, and which dimensions the model's outputs have."""

    _held: list[Part] = field(default_factory=list)  # axes that an output has, of whatever it is
    _repeated: list[Part] = field(default_factory=list)  # axes along which an operand with gradient was repeated
    _spread: list[_Spread] = field(default_factory=list)

    def note(self, node: Node, name: str, sizes: Shape, layout: Layout) -> None:
        """Take note of what was broadcast, and along which dimensions operands without gradient lie."""
        own = [size_of(edge) for edge in edges(node) if edge[0] is not None]
        wide = [
            max(len(each) + dim >= len(sizes) and each[dim - len(sizes)] for each in own) for dim in range(len(sizes))
        ]
        narrow = [dim for dim, size in enumerate(sizes) if wide[dim] != size]
        self._repeated.extend((size, tag) for dim in narrow for size, tag in layout[dim] if size > 1)
        hidden = name in MASKED_POINTWISE or rule_of(name) is fused_loss
        if not hidden and all(below is not None for below, _ in edges(node)):
            return
        known = _dims_beside(node, name, sizes)
        beside = tuple(layout[dim] for dim in known or ())
        places = range(len(sizes)) if known is None else known
        self._spread.extend(_Spread(name, layout[dim], beside, dim in narrow) for dim in places if sizes[dim] > 1)

    def hold(self, parts: tuple[Part, ...]) -> None:
        """Take note of an output's dimensions."""
        whole: dict[Axis, int] = {}  # axes as they were before a reshape cut them
        for size, tag in parts:
            if isinstance(tag, Axis) and size > 1:
                base = replace(tag, path=(), lone=False)
                whole[base] = whole.get(base, 1) * size
                self._held.append((size, tag))
        self._held.extend((size, tag) for tag, size in whole.items())

    def across_samples(self, axes: tuple[Axis, ...], parts: tuple[Part, ...], trail: Trail) -> str:
        """Name an operation that may have set samples against others; "" where none has.

        A dimension that some output of the model has is that output's. Else what spread it must have the samples' own
        dimension, too, as a target (n, T) for an output (n, 1); and be of another size, for (n, n) may be all pairs,
        unless it was seen before.
        """
        size = next((n for n, tag in parts if axes and isinstance(tag, Axis) and tag.matches(axes[0])), 0)
        for name, dim, beside, direct in self._spread:
            for part in [dim] if direct else self._copies(dim, axes):
                if any(map(self._is_held, part)):
                    continue
                many, kind = math.prod(n for n, _ in part), trail.kind("spread", name)
                trail.passing = True  # it hangs on the shape of a tensor that is in no graph
                own = [tag for each in beside for _, tag in each if isinstance(tag, Axis)]
                apart = bool(axes) and all(any(axis.matches(tag) for tag in own) for axis in axes)
                pairs = size > 1 and (many == size if direct or apart else many % size == 0)
                if (pairs and not trail.precedents.get(kind)) or (direct and not apart and not trail.known.divisors):
                    return name
                if size > 1:
                    trail.precedents[kind] = True
        return ""

    def _copies(self, dim: Dim, axes: tuple[Axis, ...]) -> list[Dim]:
        """Return the parts of a dimension that were broadcast further down, but those beside a sample's own parts."""
        sizes = math.prod(size for size, _ in dim)
        found = [part for part in self._repeated if part in dim or any(matches(part[1], tag) for _, tag in dim)]
        samples = any(matches(tag, axis) for _, tag in dim for axis in axes)
        return [(part,) for part in found if samples or part[0] == sizes]

    def _is_held(self, part: Part) -> bool:
        """Whether some output has a part, or a piece of it; one of another size was put behind it by a `cat`."""
        size, tag = part
        if size == 1 or not isinstance(tag, Axis):
            return False
        whole = math.prod(tag.path[0][:2]) if tag.path else size
        return any(
            isinstance(held, Axis) and tag.matches(held) and (bool(tag.path) if held.path else n == whole)
            for n, held in self._held
        )


def _dims_beside(node: Node, name: str, sizes: Shape) -> list[int] | None:
    """Return the dimensions that an operand without gradient has of its own; None where it is not known."""
    place = next((place for place, (below, _) in enumerate(edges(node)) if below is None), 0)
    which = _HIDDEN.get(name) or ("target" if rule_of(name) is fused_loss else ("self", "other")[min(place, 1)])
    tensor = saved_tensor(node, which)
    if tensor is None:
        return None
    skip = len(sizes) - tensor.dim()
    own = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [skip + dim for dim, size in enumerate(own) if size == sizes[skip + dim]]

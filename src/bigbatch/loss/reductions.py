"""One reduction: what it was taken over, and whether it is over data at all."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.loss import refusals
from bigbatch.loss.count import LOW_PRECISION, Count, Kind
from bigbatch.loss.divisors import Sizes, factors_below
from bigbatch.loss.graph import (
    TELLS_ITS_HOOK,
    Edge,
    edges,
    hides,
    is_guarded,
    operation,
    saved,
    saved_dims,
    saved_tensor,
    shape,
    signed,
)
from bigbatch.loss.layout import PICKED, Axis, Dim, Layout, Part
from bigbatch.loss.origin import Origin, Trail, is_made_of
from bigbatch.loss.rules import MEAN, NLL, POINTWISE_LOSSES, ROW_LOSSES, SUM, VIEWS, Rule, size_of, unreduced
from bigbatch.loss.samples import Samples
from bigbatch.loss.selections import rule_of

FUSED = NLL | POINTWISE_LOSSES | ROW_LOSSES  # losses that reduce by themselves

_ROUNDED = frozenset(LOW_PRECISION)  # a set of dtypes is faster to look into
LINEAR = frozenset("Neg ToCopy Clone Alias Squeeze Unsqueeze T Transpose Permute".split()) | VIEWS


@dataclass(frozen=True, slots=True)
class Sum:
    """What a reduction was over: `count` things averaged, or data summed, or parameters alone."""

    kind: Kind
    count: Count
    name: str
    source: Node | None = None  # the node whose saved tensor holds the count
    about: float = 0.0  # about how large that is
    doubtful: bool = False  # parameters and a tensor without gradient alone: over data, or a constant
    chosen: bool = False  # over rows that an index or a mask has taken: none of them may be left
    inside: tuple[Node, ...] = ()  # factors below a sum, `(x / n).sum()`
    sizes: Sizes | None = None  # of what was summed


def read_reduction(edge: Edge, trail: Trail) -> Sum | list[tuple[Edge, tuple[Node, ...]]] | None:
    """Follow means, sums and reshapes, one inside the other, to what they were taken over.

    Answers the reduction; or, where scalars were stacked, those with the factor that the reduction is to them; or None
    where there is no reduction.
    """
    node, output = edge
    assert node is not None  # noqa: S101 - only edges that carry gradient are read
    chain = _Chain(tuple(((1, PICKED),) for _ in shape(node, output)))
    while node is not None:
        trail.passed(node)
        name = operation(node)
        if name in {"Mean", "Sum"} and saved(node, "self_sym_sizes") == ():
            pass  # of one number: itself
        elif name in {"Mean", "Sum"}:
            chain.reduce(node, name)
        elif name == "Dot":
            chain.dot(node)
            break
        elif name in LINEAR:
            rule: Rule | None = rule_of(name)
            chain.layout = rule(node, output, chain.layout)[0][1] if rule is not None else chain.layout
        elif chain.kinds and (scalars := _scalars(node, output, name, trail)):
            return [(below, (*chain.means, *factors)) for below, factors in scalars]
        else:
            break
        node, output = edges(node)[0]
    if not chain.kinds:
        return [((node, output), ())] if node is not edge[0] and node is not None else None
    return chain.read((node, output), trail)


def _scalars(node: Node, output: int, name: str, trail: Trail) -> list[tuple[Edge, tuple[Node, ...]]]:
    """Give the scalars that a tensor was put together from: stacked, concatenated, or weighed by a constant after."""
    trail.passed(node)
    inputs = [(below, place) for below, place in edges(node) if below is not None]
    sizes = [shape(below, place) for below, place in inputs]
    if (name == "Stack" and not any(sizes)) or (name == "Cat" and all(math.prod(size) == 1 for size in sizes)):
        return [(edge, ()) for edge in inputs]
    if name in {"Mul", "Div"} and len(inputs) == 1:
        below, place = inputs[0]
        if not sizes[0] and math.prod(shape(node, output)) == 1:
            return [(inputs[0], (node,))]
        return [(edge, (node, *factors)) for edge, factors in _scalars(below, place, operation(below), trail)]
    return []


@dataclass
class _Chain:
    """Reductions inside each other, outermost first, and the layout below the last of them."""

    layout: Layout = ()
    kinds: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    means: list[Node] = field(default_factory=list)
    below: list[Edge] = field(default_factory=list)

    def reduce(self, node: Node, name: str) -> None:
        """Pass a mean or a sum: the dimensions it took away come back as axes."""
        sizes: tuple[int, ...] = tuple(saved(node, "self_sym_sizes"))
        which = len(self.kinds)
        self.layout = unreduced(node, self.layout, sizes, lambda dim: ((sizes[dim], Axis(which, dim)),))
        self.kinds.append(name)
        self.counts.append(math.prod(sizes[dim] for dim in saved_dims(node, len(sizes))))
        if name == "Mean":
            self.means.append(node)

    def dot(self, node: Node) -> None:
        """Pass a dot product: the sum of a pointwise product."""
        self.below = list(edges(node))
        (size,) = next(shape(below, place) for below, place in self.below if below is not None)
        self.layout = (((size, Axis(len(self.kinds), 0)),),)
        self.kinds.append("Sum")
        self.counts.append(size)

    def read(self, edge: Edge, trail: Trail) -> Sum:
        """Walk on below and say what the samples' own reduction was over."""
        samples = Samples(trail, unbatched=self.kinds == ["Sum"] and _is_one_distribution(edge))
        if 0 in self.counts and not self.below:  # over nothing, and nothing to look at
            return Sum("mean", 0.0, "Mean") if "Mean" in self.kinds else Sum("sum", 1.0, "Sum")
        for below in self.below or [edge]:
            if below[0] is None:
                samples.gradless = True
            else:
                samples.walk(below, self.layout)
        return self._over(samples, edge)

    def _over(self, samples: Samples, edge: Edge) -> Sum:
        if samples.shared and not samples.data:
            return Sum("once", 1.0, self.kinds[0])  # the same in every micro-batch
        if samples.data and (spread := samples.spread()):
            raise refusals.expanded(spread)
        level = self._level(samples)
        if len(self.kinds) > 1 and not samples.trail.is_as_before("level", level):
            raise refusals.lone_rows()  # in a micro-batch of one, another dimension of 1 was taken for the samples'
        name, parts = self.kinds[level], self.below or [edge]
        if not samples.data and not samples.gradless:
            return Sum("once", 1.0, name)
        if name == "Mean":
            return Sum("mean", float(self.counts[level]), name, doubtful=samples.doubtful, chosen=samples.taken)
        if all(is_made_of(Origin.PARAMETERS, part, samples.trail) for part in parts):
            return Sum("once", 1.0, name)
        if not samples.data:
            raise refusals.data_or_constant(name)
        if "Mean" in self.kinds[:level]:
            raise refusals.scaled_sum("Mean", "a number")
        factors = tuple(factors_below(edge))
        sizes = sizes_of(samples, [part for dim in self.layout for part in dim], self._rows(edge))
        return Sum("sum", 1.0, name, doubtful=samples.doubtful, inside=factors, sizes=sizes)

    def _level(self, samples: Samples) -> int:
        if samples.one_by_one and len(self.kinds) > 1:
            raise refusals.lone_rows()
        if samples.axes:
            first, seen = samples.axes[0], {axis.reduction for axis in samples.axes}
            if first.lone and any(n == 1 and level not in seen for level, n in enumerate(self.counts)):
                raise refusals.lone_rows()  # the other reduction may have been the batch's, of one sample
            return first.reduction
        for dim in self.layout:
            for _, tag in dim:
                if isinstance(tag, Axis):
                    return tag.reduction
        return 0

    def _rows(self, edge: Edge) -> frozenset[float]:
        """Give what divides a sum over classes to a mean: rows, as kl_div's batchmean does, or positions."""
        if len(self.kinds) > 1 or not _is_of_classes(edge):
            return frozenset()
        sizes = size_of(edge)
        return frozenset({float(sizes[0]), float(self.counts[0] // max(sizes[1], 1))} if len(sizes) > 1 else {1.0})


def sizes_of(samples: Samples, summed: list[Part], rows: frozenset[float]) -> Sizes:
    """Say where samples lie in what was summed, and in the model's output that it was made of."""
    first = replace(samples.axes[0], order=()) if samples.axes else None
    return Sizes(
        tuple(
            tuple(
                (size, isinstance(tag, Axis) and first is not None and replace(tag, order=()).matches(first))
                for size, tag in way
            )
            for way in (summed, samples.parts)
        ),
        samples.trail.known.time_first and not samples.placed,
        rows,
    )


def _is_of_classes(edge: Edge) -> bool:
    """Tell a product with a log-softmax: cross-entropy with class probabilities, and kl_div."""
    node = edge[0]
    while node is not None and operation(node) in {"Neg", "Mul", "Sub"}:
        node = next((below for below, _ in edges(node) if below is not None), None)
    return node is not None and operation(node) == "LogSoftmax" and shape(node) != (1,)


def _is_one_distribution(edge: Edge) -> bool:
    """Tell cross-entropy with class probabilities of a single sample, without a batch dimension."""
    return len(size_of(edge)) == 1 and _is_of_classes(edge)


def read_fused(  # noqa: C901 - one way per kind of loss
    node: Node, name: str, trail: Trail
) -> Sum:
    """Read a loss that reduces by itself: cross-entropy, squared error and their kin."""
    edge = next((edge for edge in edges(node) if edge[0] is not None), (None, 0))
    below, output = edge
    assert below is not None  # noqa: S101 - a node without gradient inputs would not exist
    sizes = shape(below, output)
    how = saved(node, "reduction")
    axes: list[Dim] = [((size, Axis(0, dim)),) for dim, size in enumerate(sizes)]
    if name in NLL:
        axes[1 if len(sizes) > 1 else 0] = ((sizes[1 if len(sizes) > 1 else 0], name),)
        count: Count = targets(node) if how == MEAN else 1.0
    elif name in ROW_LOSSES:
        axes[1:] = [((size, name),) for size in sizes[1:]]
        count = float(sizes[0]) if len(sizes) > 1 else 1.0
    else:
        count = float(math.prod(sizes))
    samples = Samples(trail, unbatched=name in NLL | ROW_LOSSES and len(sizes) == 1)
    if 0 not in sizes:
        for other, place in edges(node):
            if other is not None and shape(other, place) == sizes:
                samples.walk((other, place), tuple(axes))
    if samples.shared and not samples.data:
        return Sum("once", 1.0, name)
    if name in POINTWISE_LOSSES:
        samples.broadcasts.note(node, name, sizes, tuple(axes))
    if samples.data and (spread := samples.spread()):
        raise refusals.expanded(spread)
    if how == SUM:
        rows = frozenset({1.0} if samples.unbatched else ())
        return Sum("sum", 1.0, name, sizes=sizes_of(samples, [part for dim in axes for part in dim], rows))
    if name not in NLL:
        return Sum("mean", count, name, chosen=samples.taken)
    positions = math.prod(sizes) / max(sizes[1 if len(sizes) > 1 else 0], 1)
    return Sum("mean", count, name, source=node, about=positions, chosen=samples.taken)


def targets(node: Node) -> Count:
    """How many targets a cross-entropy was averaged over, or the sum of their class weights."""
    nll: Any = node
    raw = nll._raw_saved_total_weight  # noqa: SLF001 - as graph.saved_tensor; this one is hot
    hook = raw.unpack_hook if TELLS_ITS_HOOK else None
    if (hook is not None and hides(hook)) if TELLS_ITS_HOOK else is_guarded(node, "total_weight", raw):
        raise refusals.hidden(operation(node))
    total: Tensor = nll._saved_total_weight  # noqa: SLF001
    if total.dtype in _ROUNDED:  # bf16 cannot count beyond 256
        total = _count_again(node)
    return total.item() if total.is_cpu else total.detach()


def _count_again(node: Node) -> Tensor:
    target, weight = saved_tensor(node, "target"), saved_tensor(node, "weight")
    if target is None:
        raise refusals.hidden(operation(node))
    kept: Tensor = target != signed(saved(node, "ignore_index"))
    if weight is None:
        return kept.sum(dtype=torch.float64)
    return torch.where(kept, weight.double()[torch.where(kept, target, 0)], 0.0).sum()


def label_smoothing(node: Node, trail: Trail) -> Sum | None:
    """Recognise `cross_entropy(label_smoothing=...)`, which torch builds from a plain one and a sum over classes."""
    inputs = [below for below, _ in edges(node) if below is not None]
    if [(operation(below), len(edges(below))) for below in inputs] != [("Mul", 1), ("Mul", 1)]:
        return None
    plain, smooth = (edges(below)[0][0] for below in inputs)
    passed = [below for below in (*inputs, plain) if below is not None]
    if plain is None or smooth is None or operation(plain) not in NLL:
        return None
    while smooth is not None and operation(smooth) in {"Div", "Sum", "MaskedFill", "Neg", "Mul", "View"}:
        passed.append(smooth)
        smooth = edges(smooth)[0][0]
    source = edges(plain)[0][0]
    while source is not None and operation(source) == "View":
        source = edges(source)[0][0]
    if smooth is None or source is not smooth or operation(source) != "LogSoftmax":
        return None
    for below in passed:
        trail.passed(below)
    return read_fused(plain, operation(plain), trail)

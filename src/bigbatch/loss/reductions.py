"""One reduction: what it was taken over, and whether it is over data at all."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError
from bigbatch.loss import graph, refusals
from bigbatch.loss.count import LOW_PRECISION, Count, Term
from bigbatch.loss.divisors import Sizes, divides_by, factors_below, may_count
from bigbatch.loss.graph import TELLS_ITS_HOOK, Edge, edges, operation, saved, saved_dims, saved_tensor, shape, size_of
from bigbatch.loss.layout import PICKED, Axis, Dim, Layout, Part
from bigbatch.loss.origin import Origin, Trail, is_made_of
from bigbatch.loss.rules import MEAN, NLL, POINTWISE_LOSSES, ROW_LOSSES, SUM, VIEWS, unreduced
from bigbatch.loss.samples import Samples
from bigbatch.loss.selections import Source, row_of, rows_below, rows_put_back, rule_of

FUSED = NLL | POINTWISE_LOSSES | ROW_LOSSES  # losses that reduce by themselves
LINEAR = frozenset("Neg ToCopy Clone Alias Squeeze Unsqueeze T Transpose Permute".split()) | VIEWS
_ROUNDED = frozenset(LOW_PRECISION)  # a set of dtypes is faster to look into


class Reduced(NamedTuple):
    """What a reduction was over, as a term that stands nowhere yet; of a sum, what may divide it."""

    term: Term
    inside: tuple[Node, ...] = ()  # factors below a sum, `(x / n).sum()`
    sizes: Sizes | None = None  # of what was summed
    empty: bool = False  # whether a sum was over nothing, as of rows of which none was chosen
    divided: Node | None = None  # what has divided a sum by its number already


class Scalar(NamedTuple):
    """A scalar on the way down from the loss."""

    edge: Edge
    factors: tuple[Node, ...] = ()  # constant factors passed on the way, outermost first
    pinned: Node | None = None  # a product with a parameter above: a weight must be put there, to reach both factors


def once(name: str, node: Node | None = None) -> Term:
    """Make a term that is the same in every micro-batch."""
    return Term(node, "once", 1.0, name)


def read_reduction(edge: Edge, factors: tuple[Node, ...], trail: Trail) -> Reduced | list[Scalar] | None:
    """Follow means, sums and reshapes, one inside the other, to what they were taken over.

    Answers the reduction; or, where scalars were stacked, those with the factor that the reduction is to them; or None
    where there is no reduction.
    """
    node, output = edge
    chain = _Chain(tuple(((1, PICKED),) for _ in size_of(edge)))
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
            rule = rule_of(name)
            chain.layout = rule(node, output, chain.layout)[0][1] if rule is not None else chain.layout
        elif chain.kinds and (scalars := _scalars((node, output), trail)):
            chain.scalars = [each.edge for each in scalars]
            found = chain.read_samples((node, output), factors, trail)
            return found or [each._replace(factors=(*chain.means, *each.factors)) for each in scalars]
        else:
            break
        node, output = edges(node)[0]
    if not chain.kinds:
        return [Scalar((node, output))] if node is not edge[0] and node is not None else None
    return chain.read((node, output), trail)


def _scalars(edge: Edge, trail: Trail) -> list[Scalar]:
    """Give the scalars that a tensor was put together from: stacked, concatenated; weighed, also by learned weights."""
    node, output = edge
    if node is None or not (inputs := [each for each in edges(node) if each[0] is not None]):
        return []
    trail.passed(node)
    name, sizes = operation(node), [size_of(each) for each in inputs]
    if (name == "Stack" and not any(sizes)) or (name == "Cat" and all(math.prod(size) == 1 for size in sizes)):
        return [Scalar(each) for each in inputs]
    if name in {"Mul", "Div"} and len(inputs) == 1:
        alone = not sizes[0] and math.prod(shape(node, output)) == 1
        below = [Scalar(inputs[0])] if alone else _scalars(inputs[0], trail)
        return [each._replace(factors=(node, *each.factors)) for each in below]
    vectors = name in {"Add", "Sub", "Mul"} and saved(node, "alpha", 1) == 1 and len(shape(node, output)) == 1
    learned = [is_made_of(Origin.PARAMETERS, each, trail) for each in inputs] if vectors else []
    below = _scalars(inputs[learned.index(False)], trail) if sum(learned) == 1 else []
    if name == "Mul":  # `exp(-s) * torch.stack(losses)`
        return [each._replace(pinned=node) for each in below]
    return [Scalar(inputs[learned.index(True)]), *below] if below else []


def read_sum(edge: Edge, factors: tuple[Node, ...], trail: Trail) -> Reduced | None:
    """Read `sum(criterion(o, y) for o, y in zip(outputs, labels))`; None where it is no loop over samples.

    Of one sample alone nothing was added up; it is read as several were.
    """
    if ("samples",) in trail.precedents:
        below, how, _ = rows_below(edge)
        if ("samples", *how) in trail.precedents and any(source.rows == 1 for source in below):
            return _Chain((((1, Axis(0, 0)),),), ["Mean"], [1], scalars=[edge]).read_samples(edge, factors, trail)
    scalars, rows, node = list[Edge](), set[int](), edge[0]
    while node is not None and operation(node) == "Add" and saved(node, "alpha", 1) == 1:
        *first, last = (each for each in edges(node) if each[0] is not None)
        rows = rows or {source.rows for source in rows_below(last)[0]}
        scalars.append(last)
        number = len(scalars) + len(first)
        if number in rows:
            every = [*first, *reversed(scalars)]
            chain = _Chain((((number, Axis(0, 0)),),), ["Sum"], [number], scalars=every)
            found = chain.read_samples(edge, factors, trail)
            if found is not None:
                return found
        node = first[0][0] if first and number < max(rows, default=0) + 1 else None
    return None


@dataclass
class _Chain:
    """Reductions inside each other, outermost first, and the layout below the last of them."""

    layout: Layout = ()
    kinds: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    means: list[Node] = field(default_factory=list)
    below: list[Edge] = field(default_factory=list)
    scalars: list[Edge] = field(default_factory=list)  # that may be one sample's each

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
        (size,) = next(size_of(edge) for edge in self.below if edge[0] is not None)
        self.layout = (((size, Axis(len(self.kinds), 0)),),)
        self.kinds.append("Sum")
        self.counts.append(size)

    def read(self, edge: Edge, trail: Trail) -> Reduced:
        """Walk on below and say what the samples' own reduction was over."""
        alone = self.kinds == ["Sum"] and len(size_of(edge)) == 1 and _is_of_classes(edge)
        samples = Samples(trail, unbatched=alone)  # cross-entropy with class probabilities of one sample
        if 0 in self.counts and not self.below:  # over nothing, and nothing to look at
            is_mean = "Mean" in self.kinds
            nothing = Term(None, "mean", 0.0, "Mean") if is_mean else Term(None, "sum", 1.0, "Sum")
            return Reduced(nothing, empty=True)
        summed_up = bool(self.scalars) and not size_of(edge)
        if summed_up:
            samples.rejoin(self.scalars, self.layout[0])
        for below in self.below or [edge]:
            if below[0] is None:
                samples.gradless = True
            else:
                samples.walk(below, () if summed_up else self.layout)
        return self._over(samples, edge)

    def read_samples(self, edge: Edge, factors: tuple[Node, ...], trail: Trail) -> Reduced | None:
        """Read scalars as one sample's each; None where that is not known.

        Each must have one row of the same tensors, and be made in the same way. What each is a mean over may be a
        sample's parts, or the samples of a step that comes before them: then one of both sizes never changes.
        """
        rows, number = rows_put_back(self.scalars), len(self.scalars)
        trail.crossed = trail.crossed or (rows.crossed and rows.how is not None)
        if not rows.back or rows.how is None or math.prod(size_of(edge)) not in {1, number}:
            return None
        flat = all(len(size_of(source.edge)) <= len(("samples", "features")) for source in rows.back)
        inner = {size for scalar in self.scalars for size in _averaged(scalar, rows.back, flat=flat)}
        factors = () if "Mean" in self.kinds else (*factors, *factors_below(self.scalars[0]))
        divided = next((factor for factor in factors if divides_by(factor, number)), None)
        if divided is not None:
            self.kinds = ["Mean"]
        elif any(may_count(factor, number) for factor in factors):
            return None
        averaged = "Mean" in self.kinds
        if len(inner) > averaged or 0.0 in inner or (trail.known.time_first and not flat):
            return None
        unbound, (each,) = set(trail.unbound), inner or {1.0}
        try:
            found = self.read(edge, trail)
        except LossError:
            trail.unbound = unbound
            return None
        if averaged and found.term.kind == "mean":
            seen: set[tuple[int, float]] = trail.precedents.setdefault(("samples", *rows.how), set())
            seen.add((number, each))
            trail.precedents["samples",] = seen
            numbers, sizes = {count for count, _ in seen}, {size for _, size in seen}
            if len(sizes) > 1 and numbers != {number} - {1}:
                raise refusals.lone_rows()
            found.term.count = float(number) * each
        return found._replace(divided=divided)

    def _over(self, samples: Samples, edge: Edge) -> Reduced:
        if samples.shared and not samples.data:
            return Reduced(once(self.kinds[0]))  # the same in every micro-batch
        if samples.data:
            samples.refuse_spread()
        level = self._level(samples)
        if len(self.kinds) > 1 and not samples.trail.is_as_before("level", level):
            raise refusals.lone_rows()  # in a micro-batch of one, another dimension of 1 was taken for the samples'
        name, parts = self.kinds[level], self.below or self.scalars or [edge]
        if not samples.data and not samples.gradless:
            return Reduced(once(name))
        doubtful, chosen = samples.doubtful, samples.taken
        if name == "Mean":
            return Reduced(Term(None, "mean", float(self.counts[level]), name, doubtful=doubtful, chosen=chosen))
        if all(is_made_of(Origin.PARAMETERS, part, samples.trail) for part in parts):
            return Reduced(once(name))
        if not samples.data:
            raise refusals.data_or_constant(name)
        if "Mean" in self.kinds[:level]:
            raise refusals.scaled_sum("Mean", "a number")
        sizes = _sizes_of(samples, [part for dim in self.layout for part in dim], self._rows(edge))
        term = Term(None, "sum", 1.0, name, doubtful=doubtful, chosen=chosen)
        return Reduced(term, tuple(factors_below((self.scalars or [edge])[0])), sizes, empty=0 in self.counts)

    def _level(self, samples: Samples) -> int:
        if samples.one_by_one and (len(self.kinds) > 1 or self.scalars):
            raise refusals.lone_rows()
        if self.scalars and samples.data and (samples.glued or not samples.axes):
            raise refusals.lone_rows()
        if samples.axes:
            first, seen = samples.axes[0], {axis.reduction for axis in samples.axes}
            if first.lone and any(n == 1 and level not in seen for level, n in enumerate(self.counts)):
                raise refusals.lone_rows()  # the other reduction may have been the batch's, of one sample
            return first.reduction
        return next((tag.reduction for dim in self.layout for _, tag in dim if isinstance(tag, Axis)), 0)

    def _rows(self, edge: Edge) -> frozenset[float]:
        """Give what divides a sum over classes to a mean: rows, as kl_div's batchmean does, or positions."""
        if len(self.kinds) > 1 or not _is_of_classes(edge):
            return frozenset()
        sizes = size_of(edge)
        return frozenset({float(sizes[0]), float(self.counts[0] // max(sizes[1], 1))} if len(sizes) > 1 else {1.0})


def _averaged(scalar: Edge, rows: set[Source], *, flat: bool) -> set[float]:
    """Give over how many parts of its rows a scalar is a mean; 0 where only a saved count tells."""
    found, seen, stack = set[float](), set[Edge](), [scalar]
    while stack:
        edge = stack.pop()
        node, output = edge
        if node is None or edge in seen or ((row := row_of(node, output)) is not None and row[0] in rows):
            continue
        seen.add(edge)
        stack.extend(edges(node))
        name, sizes = operation(node), next((size_of(each) for each in edges(node) if each[0] is not None), ())
        if name == "Mean" and sizes:
            found.add(math.prod(sizes[dim] for dim in saved_dims(node, len(sizes))))
        elif name in FUSED and saved(node, "reduction") == MEAN and not (flat and name not in POINTWISE_LOSSES):
            found.add(math.prod(sizes) if name in POINTWISE_LOSSES else 0.0)
    return found


def _sizes_of(samples: Samples, summed: list[Part], rows: frozenset[float]) -> Sizes:
    """Say where samples lie in what was summed, and in the model's output that it was made of."""
    first = replace(samples.axes[0], order=()) if samples.axes else None

    def is_own(tag: object) -> bool:
        return isinstance(tag, Axis) and first is not None and replace(tag, order=()).matches(first)

    ways = tuple(tuple((size, is_own(tag)) for size, tag in way) for way in (summed, samples.parts))
    return Sizes(ways, samples.trail.known.time_first and not samples.placed, rows)


def _is_of_classes(edge: Edge) -> bool:
    """Tell a product with a log-softmax: cross-entropy with class probabilities, and kl_div."""
    node = edge[0]
    while node is not None and operation(node) in {"Neg", "Mul", "Sub"}:
        node = next((below for below, _ in edges(node) if below is not None), None)
    return node is not None and operation(node) == "LogSoftmax" and shape(node) != (1,)


def read_fused(node: Node, name: str, trail: Trail) -> Reduced:
    """Read a loss that reduces by itself: cross-entropy, squared error and their kin."""
    sizes = next(size_of(edge) for edge in edges(node) if edge[0] is not None)
    how, nll, rows = saved(node, "reduction"), name in NLL, name in ROW_LOSSES
    axes: list[Dim] = [((size, Axis(0, dim)),) for dim, size in enumerate(sizes)]
    classes = [1 if len(sizes) > 1 else 0] if nll else range(1, len(sizes)) if rows else []
    for dim in classes:
        axes[dim] = ((sizes[dim], name),)
    count = targets(node) if nll and how == MEAN else 1.0
    samples = Samples(trail, unbatched=(nll or rows) and len(sizes) == 1)
    for edge in edges(node) if 0 not in sizes else ():
        if edge[0] is not None and size_of(edge) == sizes:
            samples.walk(edge, tuple(axes))
    if samples.shared and not samples.data:
        return Reduced(once(name))
    if name in POINTWISE_LOSSES:
        samples.broadcasts.note(node, name, sizes, tuple(axes))
    if samples.data:
        samples.refuse_spread()
    if how == SUM:
        ones = frozenset({1.0} if samples.unbatched else ())
        parts = [part for dim in axes for part in dim]
        term = Term(None, "sum", 1.0, name, chosen=samples.taken)
        return Reduced(term, sizes=_sizes_of(samples, parts, ones), empty=0 in sizes)
    size = float(math.prod(size for dim, size in enumerate(sizes) if dim not in classes))
    if not nll:
        return Reduced(Term(None, "mean", 1.0 if samples.unbatched else size, name, chosen=samples.taken))
    source = node if how == MEAN else None  # of one value without a reduction nothing is saved
    return Reduced(Term(None, "mean", count, name, source=source, about=size, chosen=samples.taken))


def targets(node: Node) -> Count:
    """How many targets a cross-entropy was averaged over, or the sum of their class weights."""
    nll: Any = node
    raw = nll._raw_saved_total_weight  # noqa: SLF001 - as graph.saved_tensor; this one is hot
    hook = raw.unpack_hook if TELLS_ITS_HOOK else None
    if (hook is not None and graph.hides(hook)) if TELLS_ITS_HOOK else graph.is_guarded(node, "total_weight", raw):
        raise refusals.hidden(operation(node))
    total: Tensor = nll._saved_total_weight  # noqa: SLF001
    if total.dtype in _ROUNDED:  # bf16 cannot count beyond 256
        total = _count_again(node)
    return total.item() if total.is_cpu else total.detach()


def _count_again(node: Node) -> Tensor:
    target, weight = saved_tensor(node, "target"), saved_tensor(node, "weight")
    if target is None:
        raise refusals.hidden(operation(node))
    kept: Tensor = target != graph.signed(saved(node, "ignore_index"))
    if weight is None:
        return kept.sum(dtype=torch.float64)
    return torch.where(kept, weight.double()[torch.where(kept, target, 0)], 0.0).sum()


def label_smoothing(node: Node, trail: Trail) -> Reduced | None:
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

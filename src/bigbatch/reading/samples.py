"""Below a reduction: along which axis do the samples lie, and are they still apart?

The walk goes from the reduction down to the first operation that holds a parameter (or is compiled): what lies below
is the model. Every operation on the way must keep the samples apart, and all its branches must hold the same samples
side by side; otherwise the loss is coupled and no weights make micro-batches add up to the big batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.reading import refusals
from bigbatch.reading.graph import (
    Edge,
    edges,
    is_custom,
    is_leaf,
    is_parameter,
    is_placement,
    is_shared_by_all,
    operation,
    saved_tensor,
    shape,
)
from bigbatch.reading.layout import Axis, Layout, sample_axes
from bigbatch.reading.operations import MASKED_POINTWISE, NORMS, PURE_POINTWISE, rule_of
from bigbatch.reading.parameters import by_number, computed_weight, made_of_shared, parameters_alone, saved_factor
from bigbatch.reading.rules import MATMULS, Inputs, pointwise
from bigbatch.reading.trail import Trail

_OF_TWO_TABLES = frozenset("Mm Addmm Cdist".split())  # each row of one with each of the other
_CHOOSING = frozenset("Index IndexSelect Gather".split())
_AS_IT_IS = frozenset("T Transpose Permute View ReshapeAlias UnsafeView ToCopy Clone Mul Div Neg".split())
_MODEL_FUNCTIONS = frozenset("CompiledFunction CheckpointFunction _DDPSink _BatchNorm".split())


@dataclass(frozen=True)
class Surroundings:
    """What the reader knows beside the graph: whose parameters these are, and which tensors are the model's."""

    own: frozenset[int] = frozenset()  # ids of the optimizers' parameters: a plain tensor may be one
    is_weight: Callable[[Tensor], bool] = lambda _: False  # a frozen weight has no place in the graph
    micro_batch_norm: bool = False  # the user accepts BatchNorm over micro-batches


@dataclass
class Samples:
    """What the walk below one reduction found."""

    surroundings: Surroundings
    trail: Trail
    unbatched: bool = False  # the loss of one sample, given without a batch dimension
    axes: tuple[Axis, ...] | None = None  # along which samples lie, in every branch seen; outermost first
    data: bool = False  # the model's output was met
    expanded: str = ""  # an operation by which a tensor without gradient spread values over more places
    gradless: bool = False  # a tensor without gradient was met: data, or a constant
    shared: bool = False  # a value of all micro-batches was met
    _seen: dict[tuple[Node, int, Layout], None] = field(default_factory=dict)

    def walk(self, edge: Edge, layout: Layout) -> None:
        """Follow one branch to the model; raises where samples are coupled or an operation is unknown."""
        stack: Inputs = [(edge, layout)]
        while stack:
            (node, output), layout = stack.pop()
            if node is None or (node, output, layout) in self._seen:
                continue
            self._seen[node, output, layout] = None
            self.trail.passed(node)
            stack.extend(self._below(node, output, layout))

    def _below(self, node: Node, output: int, layout: Layout) -> Inputs:  # noqa: C901 - one way per kind of operation
        name = operation(node)
        if is_shared_by_all(node):
            self.shared = True  # the same for all samples, wherever they are
            return []
        if is_leaf(node):
            if not is_parameter(node, self.surroundings.own):
                self._model(layout, (0,))
            return []
        rule = rule_of(name)
        if name == "_Alone":
            raise refusals.alone()
        if is_placement(node, output):  # from ranks that hold parts of one model: the samples are where they were
            rule = pointwise
        elif rule is None or is_custom(node):
            if name not in _MODEL_FUNCTIONS and not any(is_parameter(n, self.surroundings.own) for n, _ in edges(node)):
                raise refusals.unknown(name)
            self._model(layout, (0,))
            return []
        if name in NORMS and self.surroundings.micro_batch_norm and "BatchNorm" in name:
            if not parameters_alone(edges(node)[0], self.surroundings.own, self.trail):  # or a weight is standardised
                self._model(layout, (0,))
            return []
        if name in MATMULS or name in NORMS or name == "Convolution":
            return self._layer(node, name, layout, rule(node, output, layout))
        inputs = rule(node, output, layout)
        if any(edge[0] is None for edge, _ in inputs) or name in MASKED_POINTWISE:
            self.gradless = self.gradless or not by_number(node, name)
            if name in PURE_POINTWISE and spreads(node, shape(node, output)):
                self.expanded = self.expanded or name
        return inputs

    def _layer(self, node: Node, name: str, layout: Layout, inputs: Inputs) -> Inputs:  # noqa: C901 - one way per kind
        """A matrix product, convolution or norm: the model's edge where one factor is a parameter."""
        own = self.surroundings.own
        data, weight = MATMULS.get(name, (0, 1))
        matrix = name in MATMULS
        if matrix:
            shared = [made_of_shared(inputs[which][0], own, self.trail) for which in (data, weight)]
            if any(shared):
                return self._beside_shared(inputs, (data, weight), shared, layout)
        held = [is_parameter(edge[0], own) for edge, _ in inputs]
        if matrix and not held[data] and not held[weight]:
            held[weight] = computed_weight(inputs[weight][0], own, self.surroundings.is_weight, self.trail)
        # A bias, too, may have been computed, and of samples: it is followed, down to its parameter mostly.
        beside = [
            each
            for place, each in enumerate(inputs)
            if place not in {data, weight} and each[0][0] is not None and not held[place] and name not in NORMS
        ]
        if held[data] and held[weight]:
            return beside
        if held[weight]:
            mine = inputs[data][1] or layout
            self._model(mine, (0,) if name == "Convolution" else tuple(range(max(len(mine) - 1, 1))))
            return beside
        if held[data] and matrix:
            self._model(layout, (*range(len(layout) - 2), len(layout) - 1))
            return beside
        if name in _OF_TWO_TABLES and any(self._is_chosen(inputs[which][0]) for which in (data, weight)):
            raise refusals.chosen_rows(name)
        if matrix:
            for place, which in ((0, data), (1, weight)):
                if inputs[which][0][0] is None:
                    self._factor_without_gradient(node, name, place, layout)
                    return []  # a frozen layer is the model's edge as a trained one is
        if inputs[data][0][0] is None:
            self.gradless = True  # samples, which a weight that was computed on the way is applied to
        return [(edge, below) for edge, below in inputs if edge[0] is not None]

    def _is_chosen(self, edge: Edge) -> bool:
        """Whether a factor is rows of a parameter that an index has chosen, which is not the model's own."""
        node = edge[0]
        while node is not None and operation(node) in _AS_IT_IS:
            node = next((below for below, _ in edges(node) if below is not None), None)
        if (
            node is None
            or operation(node) not in _CHOOSING
            or not is_parameter(edges(node)[0][0], self.surroundings.own)
        ):
            return False
        given = getattr(node, "_saved_indices", None) or (saved_tensor(node, "index"),)
        return not all(each is None or self.surroundings.is_weight(each) for each in given)

    def _beside_shared(self, inputs: Inputs, places: tuple[int, int], shared: list[bool], layout: Layout) -> Inputs:
        """A product of samples with what all micro-batches have in common: each sample against the same."""
        self.shared = True
        own_side = [which for which, is_shared in zip(places, shared, strict=True) if not is_shared]
        if own_side and inputs[own_side[0]][0][0] is None:  # own samples, from a part that is not trained
            last = len(layout) - 1
            self._model(layout, tuple(range(last)) if own_side[0] == places[0] else (*range(last - 1), last))
            return []
        return [inputs[which] for which in own_side]

    def _factor_without_gradient(self, node: Node, name: str, place: int, layout: Layout) -> None:
        """A frozen weight or batch data? Only the first leaves the rows apart."""
        which = saved_factor(name, place)
        tensor = saved_tensor(node, which)
        if tensor is None or not self.surroundings.is_weight(tensor):
            raise refusals.gradless_factor(name)
        self.trail.weights.append((node, which))
        self._model(layout, tuple(range(len(layout))))

    def _model(self, layout: Layout, dims: tuple[int, ...]) -> None:
        """The model's edge: its samples lie along its outermost dimension; compare with the other branches."""
        self.data = True
        if not layout:
            return
        found = sample_axes(layout, dims)
        if isinstance(found, str):
            if self.unbatched and all(size == 1 for dim in dims for size, _ in layout[dim]):
                return
            raise refusals.coupled(found)
        if not found:
            return
        agreed = found if self.axes is None else tuple(a for a in self.axes if any(a.matches(b) for b in found))
        if not agreed:
            raise refusals.coupled(self._where_rows_meet((*found, *(self.axes or ()))))
        self.axes = agreed

    def _where_rows_meet(self, axes: tuple[Axis, ...]) -> str:
        """Name the operation that put rows beside other rows; slow, for the error alone."""
        for node, output, layout in self._seen:
            rule = rule_of(operation(node))
            walked = rule(node, output, layout) if rule else []
            inputs = [below for (n, place), below in walked if n is not None and (n, place, below) in self._seen]
            held = [
                {(tag.reduction, tag.dim) for dim in below for _, tag in dim if isinstance(tag, Axis)}
                for below in inputs
            ]
            if any(a - b and b - a for a in held for b in held):
                return operation(node)
        return next((str(axis.order[-1][0]) for axis in axes if axis.order), "Expand")


def spreads(node: Node, sizes: tuple[int, ...]) -> bool:
    """Tell whether a dimension of the result comes from an operand without gradient alone, as in `(n, 1) - (n,)`."""
    if all(below is not None for below, _ in edges(node)):
        return False
    known = [_before_expanding(below, place) for below, place in edges(node) if below is not None]
    for dim, size in enumerate(sizes):
        places = [dim - len(sizes) + len(own) for own in known]
        if size > 1 and not any(at >= 0 and own[at] == size for at, own in zip(places, known, strict=True)):
            return True
    return False


def _before_expanding(node: Node, place: int) -> tuple[int, ...]:
    while operation(node) == "Expand" and edges(node)[0][0] is not None:
        below, place = edges(node)[0]
        node = below if below is not None else node
    return shape(node, place)

"""Below a reduction: along which axis do the samples lie, and are they still apart?

The walk goes from the reduction down to the first operation that holds a parameter (or is compiled): what lies below
is the model. Every operation on the way must keep the samples apart, and all its branches must hold the same samples
side by side; otherwise the loss is coupled and no weights make micro-batches add up to the big batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.autograd.graph import Node

from bigbatch.loss import graph, refusals, rules
from bigbatch.loss.graph import Edge, Shape, edges, operation, saved, saved_dim, saved_tensor, shape, size_of
from bigbatch.loss.layout import UNBOUND, Axis, Dim, Layout, Part, is_sliver, matches, sample_axes, without_slivers
from bigbatch.loss.origin import Origin, Trail, by_number, is_made_of, saved_factor
from bigbatch.loss.rules import MASKED_POINTWISE, MATMULS, NORMS, Inputs, Rule
from bigbatch.loss.selections import PUTS, TAKES, Place, Source, copy_slices, put_back, row_of, rows_put_back, rule_of

_HIDDEN = {"Where": "condition", "MaskedFill": "mask"}
_MODEL_FUNCTIONS = frozenset("CompiledFunction CheckpointFunction _DDPSink _BatchNorm".split())
_RECURRENT = frozenset("CudnnRnn MiopenRnn MkldnnRnnLayer LstmMps".split())


class _Spread(NamedTuple):
    """A dimension of a result that an operand without gradient may have made, or lies along."""

    name: str
    dim: Dim
    beside: Layout  # the dimensions that the operand has, where they are known
    direct: bool  # the operands with gradient were repeated along it


@dataclass
class _Broadcasts:
    """Does a tensor without gradient set samples against each other, as (n, 1) with (n,) gives (n, n)?"""

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
        hidden = name in MASKED_POINTWISE or rule_of(name) is rules.fused_loss
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


@dataclass
class Samples:
    """What the walk below one reduction found."""

    trail: Trail
    unbatched: bool = False  # the loss of one sample, given without a batch dimension
    axes: tuple[Axis, ...] | None = None  # along which samples lie, in every branch seen; outermost first
    data: bool = False  # the model's output was met
    gradless: bool = False  # a tensor without gradient was met: data, or a constant
    shared: bool = False  # a value of all micro-batches was met
    chosen: set[object] = field(default_factory=set)  # indices that have chosen rows of a parameter
    outputs: bool = False  # the model's output was met beside those
    parts: tuple[Part, ...] = ()  # of the first output that was met: its dimensions, as a sum may be divided by them
    batched: list[tuple[str, tuple[Axis, ...]]] = field(default_factory=list)  # where each sample must have its own
    placed: bool = False  # a recurrent layer has told where they lie
    glued: bool = False  # they lie along a dimension of an output that was cut apart: may it hold others behind them?
    one_by_one: bool = False  # samples came in a stack that is not followed to their rows
    _stacked: bool = False  # a stack was met
    _steps: list[Axis | None] = field(default_factory=list)  # the samples of outputs whose positions were unbound
    _first: set[Axis] = field(default_factory=set)  # those of the others
    _product: str = "Expand"  # what may have set samples against each other
    _crossed: bool = False  # one with several results of an unbind in one row
    _rows: dict[Source, Dim] = field(default_factory=dict)  # of tensors whose rows were stacked again
    _models: set[Node] = field(default_factory=set)  # see `_refuse_slopes`
    broadcasts: _Broadcasts = field(default_factory=_Broadcasts)
    _seen: dict[tuple[Node, int, Layout], None] = field(default_factory=dict)

    @property
    def doubtful(self) -> bool:
        """Parameters alone, beside a tensor without gradient or chosen by one index: over data, or over constants."""
        return not self.data or (not self.outputs and not self.gradless and len(self.chosen) == 1)

    @property
    def taken(self) -> bool:
        """Whether an index or a mask has taken the rows."""
        return any(by != "Cat" for axis in (self.axes or ())[:1] for by, _ in axis.order)

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

    def _below(self, node: Node, output: int, layout: Layout) -> Inputs:
        """Return what to follow below a node, and how samples lie there; nothing where the model begins."""
        name, known = operation(node), self.trail.known
        if graph.is_shared_by_all(node):
            self.shared = True  # the same for all samples, wherever they are
            return []
        if name in TAKES and graph.is_parameter(edges(node)[0][0], known.own):
            return self._chosen_rows(node, name, layout)
        rule = None if graph.is_custom(node) else rule_of(name)
        if rule is None:
            return self._end(node, name, output, layout)
        if "BatchNorm" in name and known.micro_batch_norm:
            if not is_made_of(Origin.PARAMETERS, edges(node)[0], self.trail):  # or a weight is standardized
                self._model(layout, (0,))
            return []
        if name in MATMULS or name in NORMS or name == "Convolution":
            return self._layer(node, name, layout, rule(node, output, layout))
        return self._operation(node, name, output, layout, rule)

    def _end(self, node: Node, name: str, output: int, layout: Layout) -> Inputs:
        """A leaf, or a function that may be the model's edge: its parameters, or compiled code, are below it."""
        own = self.trail.known.own
        if graph.is_leaf(node):
            if not graph.is_parameter(node, own):
                self._model(layout, (0,))
            return []
        if name == "_Alone":
            raise refusals.alone()
        if name not in _MODEL_FUNCTIONS and not any(graph.is_parameter(below, own) for below, _ in edges(node)):
            raise refusals.unknown(name)
        # Steps or states of a recurrent layer come before the samples, (time, batch, ...). oneDNN's layer is told of
        # batches that come first, and has them second all the same.
        steps_first = bool(output) or name == "MkldnnRnnLayer" or not saved(node, "batch_first")
        time_first = name in _RECURRENT and len(layout) == 3 and steps_first  # noqa: PLR2004
        self.placed = self.placed or time_first
        self._model(layout, (int(time_first),))
        self._refuse_slopes(node)
        return []

    def _operation(self, node: Node, name: str, output: int, layout: Layout, rule: Rule) -> Inputs:
        """An operation on the way, which has no weights."""
        written = rule is copy_slices
        inputs = copy_slices(node, output, layout, self._written) if written else rule(node, output, layout)
        row = row_of(node, output)
        if name == "Stack":
            inputs = [*inputs, *self.rejoin(edges(node), layout[saved_dim(node, "dim", len(layout))])]
        elif row is not None and row[0] in self._rows:
            inputs = [self._unbound(row[0], layout)]
        if any(edge[0] is None for edge, _ in inputs) or name in MASKED_POINTWISE:
            self.gradless = self.gradless or not by_number(node, name)
        if rule is rules.pointwise or (rule is rules.fused_loss and saved(node, "reduction") == rules.NONE):
            self.broadcasts.note(node, name, shape(node, output), layout)
        return inputs

    def rejoin(self, parts: Sequence[Edge], rows: Dim) -> Inputs:
        """Take note of tensors whose rows these parts have: they lie along it; return those that were seen before."""
        found, again = rows_put_back(parts), Inputs()
        self._stacked, self._crossed = True, self._crossed or found.crossed
        for source in found.back:
            before = self._rows.setdefault(source, rows)
            if before != rows and not all(matches(a, b) for _, a in before for _, b in rows):  # rows that met others
                self._rows[source] = ((source.rows, "Stack"),)
                seen = [(below, row_of(node, output)) for node, output, below in self._seen]
                again += [self._unbound(source, below) for below, row in seen if row is not None and row[0] == source]
        return again

    def _unbound(self, source: Source, layout: Layout) -> tuple[Edge, Layout]:
        """Give the layout before rows were taken that are together again."""
        return source.edge, (*layout[: source.dim], self._rows[source], *layout[source.dim :])

    def _layer(self, node: Node, name: str, layout: Layout, inputs: Inputs) -> Inputs:
        """A matrix product, convolution or norm: the model's edge where one factor is a parameter."""
        data, weight = MATMULS.get(name, (0, 1))
        matrix = name in MATMULS
        if matrix:
            shared = [is_made_of(Origin.SHARED, inputs[which][0], self.trail) for which in (data, weight)]
            if any(shared):
                return self._beside_shared(inputs, (data, weight), shared, layout)
        held = self._held(name, inputs, data, weight)
        # A bias, too, may have been computed, and of samples: it is followed, down to its parameter mostly.
        beside = [
            each
            for place, each in enumerate(inputs)
            if place not in {data, weight} and each[0][0] is not None and not held[place] and name not in NORMS
        ]
        if held[data] and held[weight]:
            return beside
        if held[weight]:
            self._refuse_slopes(inputs[data][0][0])
            mine = put_back(inputs[data][1] or layout, inputs[data][0][0])
            self._model(mine, (0,) if name == "Convolution" else tuple(range(max(len(mine) - 1, 1))), layout)
            return beside
        if held[data] and matrix:
            self._model(layout, (*range(len(layout) - 2), len(layout) - 1))
            return beside
        if matrix:
            for place, which in ((0, data), (1, weight)):
                if inputs[which][0][0] is None and not self._is_batched(node, name, place, layout):
                    self._factor_without_gradient(node, name, place, layout)
                    return []  # a frozen layer is the model's edge as a trained one is
        self._product = name
        if inputs[data][0][0] is None:
            self.gradless = True  # samples, which a weight that was computed on the way is applied to
        return [(edge, below) for edge, below in inputs if edge[0] is not None]

    def _held(self, name: str, inputs: Inputs, data: int, weight: int) -> list[bool]:
        """Tell which inputs of a layer are the model's: parameters, or computed of such."""
        held = [graph.is_parameter(edge[0], self.trail.known.own) for edge, _ in inputs]
        if name in MATMULS and not held[data]:
            held[data] = is_made_of(Origin.WEIGHT, inputs[data][0], self.trail)
        if name not in NORMS and not held[data] and not held[weight]:
            held[weight] = is_made_of(Origin.BESIDE, inputs[weight][0], self.trail)
        return held

    def _chosen_rows(self, node: Node, name: str, layout: Layout) -> Inputs:
        """Rows of a parameter that an index has chosen: of the model's own, a parameter; else one for each sample."""
        given = graph.saved_indices(node) if name == "Index" else (saved_tensor(node, "index"),)
        by = {place: each for place, each in enumerate(given) if each is not None}
        if by and all(map(self.trail.known.is_weight, by.values())):
            return []
        self.chosen.update(each.data_ptr() for each in by.values())
        below = edges(node)[0][0]
        dim = min(by, default=0) if name == "Index" else saved_dim(node, "dim", len(layout))
        self._model(layout, (0 if below is not None and operation(below) == "Expand" else dim,), chosen=True)
        return []

    def _beside_shared(self, inputs: Inputs, places: tuple[int, int], shared: list[bool], layout: Layout) -> Inputs:
        """A product of samples with what all micro-batches have in common: each sample against the same."""
        self.shared = True
        own_side = [which for which, is_shared in zip(places, shared, strict=True) if not is_shared]
        if own_side and inputs[own_side[0]][0][0] is None:  # own samples, from a part that is not trained
            last = len(layout) - 1
            self._model(layout, tuple(range(last)) if own_side[0] == places[0] else (*range(last - 1), last))
            return []
        return [inputs[which] for which in own_side]

    def _is_batched(self, node: Node, name: str, place: int, layout: Layout) -> bool:
        """Whether a factor without gradient is one matrix per sample: then each meets its own, if samples lie there."""
        tensor = saved_tensor(node, saved_factor(name, place))
        if not layout[:-2] or tensor is None or tensor.stride(0) == 0 or self.trail.known.is_weight(tensor):
            return False
        self.gradless = self.trail.passing = True
        apart = (part for dim in without_slivers(layout[:-2]) for part in dim)
        self.batched.append((name, tuple(tag for _, tag in apart if isinstance(tag, Axis))))
        return True

    def _factor_without_gradient(self, node: Node, name: str, place: int, layout: Layout) -> None:
        """A frozen weight or batch data? Only the first leaves the rows apart."""
        which = saved_factor(name, place)
        tensor = saved_tensor(node, which)
        if tensor is None or not self.trail.known.is_weight(tensor):
            raise refusals.gradless_factor(name)
        self.trail.weights.append((node, which))
        self._model(layout, tuple(range(len(layout))))

    def _model(
        self, layout: Layout, dims: tuple[int, ...], result: Layout | None = None, *, chosen: bool = False
    ) -> None:
        """The model's edge: its samples lie along its outermost dimension; compare with the other branches."""
        self.data = True
        self.outputs = self.outputs or not chosen
        if not layout:
            return
        self.glued = self.glued or len(dims) > 1 or len(layout[dims[0]]) > 1
        found = sample_axes(layout, dims, self._one_sample)
        if isinstance(found, str):
            if self.unbatched and all(size == 1 for dim in dims for size, _ in layout[dim]):
                return
            if found == rules.BY_CONSTANT:
                raise refusals.gradless_factor("LinalgSolveTriangular")
            pooled = found in PUTS or found == "ScatterReduce"
            raise refusals.pooled(found) if pooled else refusals.coupled(found, chosen=bool(self.chosen))
        if any(tag is UNBOUND for _, tag in layout[dims[0]][:1]):
            self._steps.append(found[0] if found else None)
        else:
            self._first.update(found[:1])
        result = layout if result is None else result
        order = (*dims, *(dim for dim in range(len(result)) if dim not in dims)) if len(result) > max(dims) else ()
        parts = tuple(part for dim in order for part in result[dim])
        self.broadcasts.hold(parts)
        if found:
            self._align(found, parts)

    def _align(self, found: tuple[Axis, ...], parts: tuple[Part, ...]) -> None:
        """Compare along which axes samples lie in an output with those of the others before."""
        puts = {axis: by for axis in found for by, _ in axis.order if by in PUTS}  # where they were not taken from
        if found[0] in puts or "IndexPut" in puts.values():
            raise refusals.pooled(puts.get(found[0], "IndexPut"))
        found = tuple(axis for axis in found if axis not in puts)
        if self.axes is None:
            self.axes, self.parts = found, parts
            return
        if not all(map(is_sliver, self.axes)) and not all(map(is_sliver, found)):  # slivers say nothing beside others
            self.axes, found = (tuple(a for a in axes if not is_sliver(a)) for axes in (self.axes, found))
        mine = tuple(a for a in self.axes if any(a.matches(b) for b in found))
        theirs = tuple(b for b in found if any(a.matches(b) for a in self.axes))
        # The same samples outermost; or, where time comes first in one of them, all that the other has.
        if not self.axes[0].matches(found[0]) and len(mine) < len(self.axes) and len(theirs) < len(found):
            met = next((by for axis in (*found, *self.axes) for by, _ in axis.order), self._product)
            raise refusals.coupled(met, chosen=bool(self.chosen))
        self.axes = mine

    def _refuse_slopes(self, node: Node | None) -> None:
        """Refuse a derivative of a mean, made with `create_graph=True`: it holds 1 / n of the micro-batch.

        All that such a derivative went through leads to torch's own backward of the loss.
        """
        while node is not None and node not in self._models:
            self._models.add(node)
            name, inputs = operation(node), edges(node)
            loss = name.removesuffix("Backward")
            if loss != name and loss in rules.NLL | rules.POINTWISE_LOSSES and saved(node, "reduction") == rules.MEAN:
                raise refusals.slope(loss)
            after = inputs[MATMULS[name][0] :] if name in MATMULS else inputs
            node = next((below for below, _ in after if below is not None), None)

    def _one_sample(self, size: int) -> bool:
        """Whether what was seen as one row is one sample, as `x.view(1, k)` of k parts: if it was for several.

        Or if the micro-batch is known to be one; where that is checked, it is taken for one in any case.
        """
        key = self.trail.kind("rows")
        if size > 1:
            self.trail.precedents[key] = True
        return key in self.trail.precedents or self.trail.known.divisors or self.trail.known.is_one()

    def _written(self, fits: list[Place]) -> Place | None:
        """Choose where a part was written over: in the only place that fits, or in that of a graph of this kind."""
        key = self.trail.kind("written")
        number = {sum(1 << dim for dim in dims): dims for dims in fits}
        if len(fits) == 1:
            self.trail.precedents[key] = next(iter(number))
        return number.get(self.trail.precedents.get(key, 0))

    def refuse_spread(self) -> None:
        """Raise where an operation may have set samples against others, which have no gradient."""
        # Where another output has the same samples outermost, what was unbound are steps, as inside of an LSTM.
        if not all(axis and any(axis.matches(first) for first in self._first) for axis in self._steps):
            if self._crossed:
                raise refusals.coupled("Unbind")
            self.one_by_one = self._stacked
            self.trail.unbound.update(node for node, _, _ in self._seen if operation(node) == "Unbind")
        known = self.trail.known
        for name, axes in () if known.divisors or known.is_one() else self.batched:
            if not self.axes or not any(axis.matches(self.axes[0]) for axis in axes):
                raise refusals.gradless_factor(name)
        self.trail.samples.update(n for n, tag in self.parts if self.axes and matches(tag, self.axes[0]))
        spread = self.broadcasts.across_samples(self.axes or (), self.parts, self.trail)
        if spread:
            raise refusals.expanded(spread)


def _dims_beside(node: Node, name: str, sizes: Shape) -> list[int] | None:
    """Return the dimensions that an operand without gradient has of its own; None where it is not known."""
    place = next((place for place, (below, _) in enumerate(edges(node)) if below is None), 0)
    fused = rule_of(name) is rules.fused_loss
    which = _HIDDEN.get(name) or ("target" if fused else ("self", "other")[min(place, 1)])
    tensor = saved_tensor(node, which)
    if tensor is None:
        return None
    skip = len(sizes) - tensor.dim()
    own = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [skip + dim for dim, size in enumerate(own) if size == sizes[skip + dim]]

"""Reads losses, and remembers how a graph of the same signature was read.

Reading follows a graph operation by operation. A training loop builds the same graph every time, so a reading is kept
with the signature of all that it looked at: names, shapes, settings, which inputs carry gradient. Where a new graph
has the same signature the answer is the same, but for the counts that live in tensors; and frozen weights, which are
in no graph, must be found to be the model's again.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.loss.graph import (
    LOOKS_THROUGH,
    Edge,
    edges,
    is_custom,
    is_leaf,
    is_number,
    is_shared_by_all,
    is_stand_in,
    is_watched,
    operation,
    saved_number,
    saved_tensor,
    unseen,
)
from bigbatch.loss.operations import NLL, NORMS, PURE_POINTWISE, RULES
from bigbatch.loss.reductions import targets
from bigbatch.loss.rules import MATMULS
from bigbatch.loss.samples import Surroundings
from bigbatch.loss.selections import rows_index
from bigbatch.loss.terms import Term, divided_by, read
from bigbatch.loss.trail import Trail

_KEEP = 8  # the latest readings; ragged sequences have a new shape every time
_BY_TENSOR = frozenset(
    "Index IndexSelect IndexPut MaskedSelect IndexAdd IndexCopy".split()
)  # read by what their indices are
_FACTORS = frozenset("Mul Div Pow".split())
_FOLLOWS = NLL | PURE_POINTWISE - {"Expand"} | frozenset("Softmax LogSoftmax".split())


class _Look(NamedTuple):
    """All of a node that a reading may depend on, but for its tensors: where it was found, and what was found there."""

    parent: int  # the input number `place` of the node of this number
    place: int
    sort: type
    sizes: list[object] | None  # None where they follow from its inputs'
    wired: list[int] | None  # of each input, which result it is; -1 for one without gradient; None: the only one
    held: tuple[tuple[int, type, tuple[type, ...]], ...] | None  # instead, for a layer: the types on the way down, too
    factors: list[object] | None  # numbers it multiplies by
    asked: Callable[[Node], object] | None  # gives its saved attributes that are not tensors
    settings: object  # what they were: dimensions, reductions


class _Reading(NamedTuple):
    """One reading: all the nodes it looked at, and the terms it found."""

    output: int
    looks: tuple[_Look, ...]
    # Numbers of the term's node and of the one that holds its count, and what that is.
    terms: tuple[tuple[int, int, str, Term], ...]
    weights: tuple[tuple[int, str], ...]  # numbers of nodes, and which of their saved tensors is a frozen weight

    def again(  # noqa: PLR0911 - a way out per difference
        self, root: Node, output: int, is_weight: Callable[[Tensor], bool]
    ) -> list[Term] | None:
        """Return the terms of a graph that looks the same; None where it differs."""
        if output != self.output:
            return None
        nodes: list[Node] = []
        inputs: list[tuple[Edge, ...]] = []
        for parent, place, sort, sizes, wired, held, factors, asked, settings in self.looks:
            node = inputs[parent][place][0] if nodes else root
            if node is None or type(node) is not sort:
                return None
            below = node.next_functions
            if sizes is not None and _sizes(node) != sizes:
                return None
            if wired is not None and [number if n is not None else -1 for n, number in below] != wired:
                return None
            if asked is not None and asked(node) != settings:
                return None
            if held is not None and not _same_ways(below, held):
                return None
            if factors is not None and _factors(node) != factors:
                return None
            nodes.append(node)
            inputs.append(below)
        if self.weights and not _still_weights([(nodes[at], which) for at, which in self.weights], is_weight):
            return None
        return [
            _refreshed(term, nodes[at], nodes[source] if source >= 0 else None, what)
            for at, source, what, term in self.terms
        ]


class Reader:
    """Reads the losses of one accumulator."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Start with nothing remembered."""
        self._surroundings, self._is_weight = surroundings, surroundings.is_weight
        self._readings: list[_Reading] = []
        self.fresh = False  # whether the latest loss looked unlike those before

    def read(self, loss: Tensor) -> list[Term]:
        """Return the terms of a loss, or raise a LossError that says what to type."""
        if is_watched():
            with unseen():
                return self._read(loss)
        return self._read(loss)

    def _read(self, loss: Tensor) -> list[Term]:
        root = loss.grad_fn
        self.fresh = False
        if root is not None:
            for reading in self._readings:
                terms = reading.again(root, loss.output_nr, self._is_weight)
                if terms is not None:
                    return terms
        trail = Trail()
        self.fresh = True
        terms = read(loss, self._surroundings, trail)
        if root is not None:
            self._remember(root, loss.output_nr, terms, trail)
        return terms

    def forget(self) -> None:
        """Read anew whatever comes."""
        self._readings.clear()

    def _remember(self, root: Node, output: int, terms: list[Term], trail: Trail) -> None:
        nothing = any(term.kind == "mean" and term.source is None and not term.count for term in terms)
        # Of a mean over nothing, as of an empty mask, nothing was looked at below.
        if trail.passing or nothing or any(map(_is_by_tensor, trail.nodes)):
            return
        numbers, looks = {root: 0}, [_look(root, 0, 0, None)]
        for node in trail.nodes:  # parents come before their inputs
            if node not in numbers:
                return
            for place, (below, _) in enumerate(edges(node)):
                if below is not None and below in trail.nodes and below not in numbers:
                    looks.append(_look(below, numbers[node], place, node))
                    numbers[below] = len(numbers)
        if any(look is None for look in looks):
            return
        kept = tuple(
            (
                numbers[term.node or root],
                -1 if term.source is None else numbers[term.source],
                "" if term.source is None else operation(term.source),
                _forgotten(term),
            )
            for term in terms
        )
        weights = tuple((numbers[node], which) for node, which in trail.weights)
        self._readings.insert(0, _Reading(output, tuple(look for look in looks if look is not None), kept, weights))
        del self._readings[_KEEP:]


class _Kind(NamedTuple):
    """What there is to look at in a kind of node."""

    layer: bool  # whether its inputs are parameters matters
    factor: bool  # whether what it multiplies by is a number matters
    settings: Callable[[Node], object] | None  # its saved attributes that are not tensors


_kinds: dict[type, _Kind] = {}


def _look(node: Node, parent: int, place: int, above: Node | None) -> _Look | None:
    """Take down what a node looks like; None where its type does not tell what it is."""
    name = operation(node)
    sort = type(node)
    if sort not in _kinds:
        custom = is_custom(node) and name not in {"_Counted", "_BatchNorm"} and not is_shared_by_all(node)
        if custom or (
            not is_custom(node) and not is_stand_in(sort) and sort.__name__ != node.name().rpartition("::")[2]
        ):
            return None
        saved = [attribute for attribute in dir(node) if attribute.startswith("_saved_")]
        plain = (
            [attribute for attribute in saved if not hasattr(node, "_raw" + attribute)] if name not in MATMULS else []
        )
        layer = name in MATMULS or name in NORMS or name == "Convolution" or name not in RULES
        _kinds[sort] = _Kind(layer and not is_leaf(node), name in _FACTORS, attrgetter(*plain) if plain else None)
    kind = _kinds[sort]
    follows = name in _FOLLOWS and all(below is not None for below, _ in edges(node))
    told = above is not None and _tells_sizes(above)
    return _Look(
        parent,
        place,
        sort,
        None if follows or told else _sizes(node),
        None if kind.layer or _single_file(node) else [number if n is not None else -1 for n, number in edges(node)],
        tuple([(number, *_way(n)) for n, number in edges(node)]) if kind.layer else None,
        _factors(node) if kind.factor else None,
        kind.settings,
        kind.settings(node) if kind.settings is not None else None,
    )


def _is_by_tensor(node: Node) -> bool:
    name = operation(node)
    return name in _BY_TENSOR or (name in {"Gather", "ScatterAdd"} and rows_index(node) is not None)


def _single_file(node: Node) -> bool:
    """Whether there is one input, of one result: following it says all there is to say of it."""
    inputs = edges(node)
    return len(inputs) == 1 and inputs[0][0] is not None and len(_sizes(inputs[0][0])) == 1


def _tells_sizes(node: Node) -> bool:
    """Whether a node's settings hold the shape of its only input, as a view's do: asking for sizes is slow."""
    return _single_file(node) and hasattr(node, "_saved_self_sym_sizes")


def _sizes(node: Node) -> list[object]:
    metadata = cast("Any", node)
    return [result.shape for result in metadata._input_metadata]  # noqa: SLF001 - see graph.shape


def _way(node: Node | None) -> tuple[type, tuple[type, ...]]:
    """Return the types from an input through transposes and casts to what they are of: a parameter or something else.

    That a leaf is a parameter was seen at the first reading; a leaf in the same place of the same layer is one, too.
    """
    first, way = type(node), list[type]()
    while node is not None and not is_leaf(node) and operation(node) in LOOKS_THROUGH:
        node = node.next_functions[0][0]
        way.append(type(node))
    return first, tuple(way)


def _same_ways(inputs: tuple[Edge, ...], ways: tuple[tuple[int, type, tuple[type, ...]], ...]) -> bool:
    if len(inputs) != len(ways):
        return False
    for (found, number), (wired, first, way) in zip(inputs, ways):  # noqa: B905 - hot, and just compared
        if type(found) is not first or number != wired:
            return False
        node: Any = found
        for sort in way:
            node = node.next_functions[0][0]
            if type(node) is not sort:
                return False
    return True


def _still_weights(places: list[tuple[Node, str]], is_weight: Callable[[Tensor], bool]) -> bool:
    tensors = [saved_tensor(node, which) for node, which in places]
    return all(tensor is not None and is_weight(tensor) for tensor in tensors)


def _factors(node: Node) -> list[object]:
    found: list[object] = []
    for which in ("self", "other", "exponent"):
        tensor = saved_tensor(node, which)
        if tensor is None:
            found.append(saved_number(node, which))
        elif tensor.dim() or not tensor.is_cpu:
            found.append((tensor.dim(), tensor.dtype))
        else:
            found.append((tensor.item(), is_number(tensor)))
    return found


def _forgotten(term: Term) -> Term:
    """Let go of the graph: what is kept must not keep activations alive."""
    return replace(term, node=None, source=None, value=None, count=0.0 if term.source else term.count)


def _refreshed(term: Term, node: Node, source: Node | None, what: str) -> Term:
    """Put the new graph's node and count into a remembered term."""
    kind, count, value = term.kind, term.count, None
    if what in NLL and source is not None:
        count = targets(source)
    elif what == "Div" and source is not None:
        count = divided_by(source, term.mask)
    elif source is not None:
        carried = cast("Any", source)
        kind, count, value = carried.kind, carried.count, carried.value
    return Term(
        node,
        kind,
        count,
        term.name,
        value,
        term.divided,
        term.factors,
        term.doubtful,
        source,
        term.about,
        term.shared,
        term.mask,
    )

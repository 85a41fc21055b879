"""Reads losses, and remembers how a graph of the same signature was read.

Reading follows a graph operation by operation. A training loop builds the same graph every time, so a reading is kept
with the signature of all that it looked at: names, shapes, settings, which inputs carry gradient. Where a new graph
has the same signature the answer is the same, but for the counts that live in tensors; and frozen weights, which are
in no graph, must be found to be the model's again.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.loss.count import Kind, Term
from bigbatch.loss.divisors import divided_by
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
from bigbatch.loss.selections import results, rows_index
from bigbatch.loss.terms import read
from bigbatch.loss.trail import Precedents, Surroundings, Trail

_KEEP = 8  # the latest readings; ragged sequences have a new shape every time
_BY_TENSOR = frozenset(
    "Index IndexSelect IndexPut MaskedSelect IndexAdd IndexCopy".split()
)  # read by what their indices are
_FACTORS = frozenset("Mul Div Pow".split())
_FOLLOWS = NLL | PURE_POINTWISE - {"Expand"} | frozenset("Softmax LogSoftmax".split())
_OURS = frozenset({"_Counted", "_BatchNorm"})
_LAYERS = frozenset({*MATMULS, *NORMS, "Convolution"})

Inspection: TypeAlias = Callable[[Any], object]  # of a node


class _Look(NamedTuple):
    """All of a node that a reading may depend on, but for its tensors: where it was found, and what was found there."""

    parent: int  # the input number `place` of the node of this number
    place: int
    sort: type
    inspect: Inspection | None  # None: its type says all there is
    found: object


class _Found(NamedTuple):
    """A term that was found: the numbers of its node and of the one that holds its count, if any."""

    node: int
    source: int | None
    renew: Callable[[Node, Any], Term]  # given those of a new graph, with its count


class _Reading(NamedTuple):
    """One reading: all the nodes it looked at, and the terms it found."""

    output: int
    looks: tuple[_Look, ...]
    terms: tuple[_Found, ...]
    weights: tuple[tuple[int, str], ...]  # numbers of nodes, and which of their saved tensors is a frozen weight

    def again(self, root: Node, output: int, is_weight: Callable[[Tensor], bool]) -> list[Term] | None:
        """Return the terms of a graph that looks the same; None where it differs."""
        if output != self.output:
            return None
        nodes: list[Node] = []
        inputs: list[tuple[Edge, ...]] = []
        node: Node | None = root
        for parent, place, sort, inspect, found in self.looks:
            if nodes:
                node = inputs[parent][place][0]
            if type(node) is not sort or node is None:
                return None
            below = node.next_functions
            if inspect is not None and inspect(node) != found:
                return None
            nodes.append(node)
            inputs.append(below)
        for at, which in self.weights:
            tensor = saved_tensor(nodes[at], which)
            if tensor is None or not is_weight(tensor):
                return None
        return [renew(nodes[at], None if counting is None else nodes[counting]) for at, counting, renew in self.terms]


class Reader:
    """Reads the losses of one accumulator."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Start with nothing remembered."""
        self._surroundings, self._is_weight = surroundings, surroundings.is_weight
        self._readings: list[_Reading] = []
        self._precedents: Precedents = {}
        self._settings: dict[type, Inspection | None] = {}  # of a type of nodes
        self.fresh = False  # whether the latest loss looked unlike those before

    def read(self, loss: Tensor) -> list[Term]:
        """Return the terms of a loss, or raise a LossError that says what to type."""
        if is_watched():
            with unseen():
                return self._read(loss)
        return self._read(loss)

    def forget(self) -> None:
        """Read anew whatever comes."""
        self._readings.clear()

    def _read(self, loss: Tensor) -> list[Term]:
        root, output = loss.grad_fn, loss.output_nr
        self.fresh = False
        if root is not None:
            for reading in self._readings:
                terms = reading.again(root, output, self._is_weight)
                if terms is not None:
                    return terms
        self.fresh = True
        trail = Trail(self._surroundings, self._precedents)
        terms = read(loss, trail)
        if root is not None:
            self._remember(root, output, terms, trail)
        return terms

    def _remember(self, root: Node, output: int, terms: list[Term], trail: Trail) -> None:
        nothing = any(term.kind == "mean" and term.source is None and not term.count for term in terms)
        # Of a mean over nothing, as of an empty mask, nothing was looked at below.
        if trail.passing or nothing or any(map(_is_by_tensor, trail.nodes)):
            return
        numbers, looks = {root: 0}, [self._look(root, 0, 0, None)]
        for node in trail.nodes:  # parents come before their inputs
            if node not in numbers:
                return
            for place, (below, _) in enumerate(edges(node)):
                if below is not None and below in trail.nodes and below not in numbers:
                    looks.append(self._look(below, numbers[node], place, node))
                    numbers[below] = len(numbers)
        told = tuple(look for look in looks if look is not None)
        if len(told) < len(looks):
            return
        found = tuple(
            _Found(numbers[term.node or root], None if term.source is None else numbers[term.source], _renewal(term))
            for term in terms
        )
        weights = tuple((numbers[node], which) for node, which in trail.weights)
        self._readings.insert(0, _Reading(output, told, found, weights))
        del self._readings[_KEEP:]

    def _look(self, node: Node, parent: int, place: int, above: Node | None) -> _Look | None:
        """Take down what a node looks like; None where its type does not tell what it is."""
        name, sort, inputs = operation(node), type(node), edges(node)
        if not _is_told_by_type(node, name):
            return None
        if sort not in self._settings:
            self._settings[sort] = _settings(node, name)
        follows = name in _FOLLOWS and all(below is not None for below, _ in inputs)
        told = above is not None and _is_single_file(above) and hasattr(above, "_saved_self_sym_sizes")
        layer = (name in _LAYERS or name not in RULES) and not is_leaf(node)
        inspections = (
            None
            if follows or told
            else _size
            if results(node) == 1
            else _sizes,  # they follow from its inputs', or from the settings of a view
            _ways([(number, type(below), _way(below)) for below, number in inputs]) if layer else None,
            None if layer or _is_single_file(node) else _wires,
            _factors if name in _FACTORS else None,
            self._settings[sort],
        )
        inspect = _all([each for each in inspections if each is not None])
        return _Look(parent, place, sort, inspect, None if inspect is None else inspect(node))


def _is_told_by_type(node: Node, name: str) -> bool:
    """Tell whether nodes of the same type are the same operation."""
    if is_custom(node):
        return name in _OURS or is_shared_by_all(node)
    return is_stand_in(type(node)) or type(node).__name__ == node.name().rpartition("::")[2]


def _is_by_tensor(node: Node) -> bool:
    name = operation(node)
    return name in _BY_TENSOR or (name in {"Gather", "ScatterAdd"} and rows_index(node) is not None)


def _is_single_file(node: Node) -> bool:
    """Whether there is one input, of one result: following it says all there is to say of it."""
    inputs = edges(node)
    return len(inputs) == 1 and inputs[0][0] is not None and results(inputs[0][0]) == 1


# What there is to see of a node.


def _all(inspections: list[Inspection]) -> Inspection | None:
    """Inspect it in all these ways at once."""
    if len(inspections) <= 1:
        return inspections[0] if inspections else None
    if len(inspections) > 2:  # noqa: PLR2004
        return lambda node: [inspect(node) for inspect in inspections]
    first, second = inspections
    return lambda node: (first(node), second(node))


def _size(node: Any) -> object:
    return node._input_metadata[0].shape  # noqa: SLF001 - see graph.shape


def _sizes(node: Any) -> list[object]:
    return [result.shape for result in node._input_metadata]  # noqa: SLF001 - see graph.shape


def _wires(node: Any) -> list[int]:
    """Return of each input which result it is; -1 for one without gradient."""
    return [number if below is not None else -1 for below, number in node.next_functions]


def _settings(node: Node, name: str) -> Inspection | None:
    """Inspect saved attributes that are not tensors: dimensions, reductions."""
    plain = [each for each in dir(node) if each.startswith("_saved_") and not hasattr(node, "_raw" + each)]
    if not plain or name in MATMULS:
        return None
    return attrgetter(*plain)


def _way(node: Node | None) -> tuple[type, ...]:
    """Return the types from an input through transposes and casts to what they are of: a parameter or something else.

    That a leaf is a parameter was seen at the first reading; a leaf in the same place of the same layer is one, too.
    """
    way = list[type]()
    while node is not None and not is_leaf(node) and operation(node) in LOOKS_THROUGH:
        node = node.next_functions[0][0]
        way.append(type(node))
    return tuple(way)


def _ways(ways: list[tuple[int, type, tuple[type, ...]]]) -> Inspection:
    """Inspect whether each input of a layer is reached on the way that it was."""

    def inspect(node: Any) -> bool:
        inputs = node.next_functions
        if len(inputs) != len(ways):
            return False
        for (first, number), (wired, sort, way) in zip(inputs, ways):  # noqa: B905 - hot, and just compared
            if type(first) is not sort or number != wired:
                return False
            below: Any = first
            for each in way:
                below = below.next_functions[0][0]
                if type(below) is not each:
                    return False
        return True

    return inspect


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


def _renewal(term: Term) -> Callable[[Node, Any], Term]:
    """Return what makes the same term of another graph; it must not keep this graph and its activations alive."""
    name, divided, factors, doubtful = term.name, term.divided, term.factors, term.doubtful
    about, shared, mask, chosen = term.about, term.shared, term.mask, term.chosen
    by, own = "" if term.source is None else operation(term.source), 0.0 if term.source else term.count
    known: Kind = term.kind

    def renew(node: Node, source: Any) -> Term:
        kind, value = known, None
        if source is None:
            count = own
        elif by in NLL:
            count = targets(source)
        elif by == "Div":
            count = divided_by(source, mask)
        else:
            kind, count, value = source.kind, source.count, source.value
        return Term(node, kind, count, name, value, divided, factors, doubtful, source, about, shared, mask, chosen)

    return renew

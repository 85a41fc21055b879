"""Reads losses, and remembers how a graph of the same signature was read.

Reading follows a graph operation by operation. A training loop builds the same graph every time, so a reading is kept
with the signature of all that it looked at: names, shapes, settings, which inputs carry gradient. Where a new graph
has the same signature the answer is the same, but for the counts that live in tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from bigbatch.graph import Node, edges, is_custom, is_leaf, is_parameter, operation, saved_number, saved_tensor
from bigbatch.operations import MATMULS, NLL, NORMS, RULES
from bigbatch.reductions import targets
from bigbatch.samples import Surroundings
from bigbatch.terms import Term, read
from bigbatch.trail import Trail

Signature: TypeAlias = tuple[Any, ...]

_KEEP = 8  # the latest readings; ragged sequences have a new shape every time
_BY_TENSOR = frozenset("Index IndexSelect MaskedSelect".split())  # read by what their indices are
_FACTORS = frozenset("Mul Div Pow".split())


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading: the path to each node it looked at, the signatures found there, and the terms."""

    start: Signature
    path: tuple[tuple[int, int, Signature], ...]  # from the node of that number, the input of that number
    terms: tuple[tuple[int, int, Term], ...]  # numbers of the term's node and of the one that holds its count

    def again(self, root: Node, start: Signature, own: frozenset[int]) -> list[Term] | None:
        """Return the terms of a graph with the same signature; None where it differs."""
        if start != self.start:
            return None
        nodes = [root]
        for parent, place, signature in self.path:
            node = nodes[parent].next_functions[place][0]
            if node is None or _signature(node, own) != signature:
                return None
            nodes.append(node)
        return [_refreshed(term, nodes[at], nodes[source] if source >= 0 else None) for at, source, term in self.terms]


class Reader:
    """Reads the losses of one accumulator."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Start with nothing remembered."""
        self._surroundings = surroundings
        self._readings: list[_Reading] = []

    def read(self, loss: Tensor) -> list[Term]:
        """Return the terms of a loss, or raise a LossError that says what to type."""
        root = loss.grad_fn
        if root is None:
            return read(loss, self._surroundings, Trail())
        own = self._surroundings.own
        start = (loss.output_nr, _signature(root, own))
        for reading in self._readings:
            terms = reading.again(root, start, own)
            if terms is not None:
                return terms
        trail = Trail()
        terms = read(loss, self._surroundings, trail)
        self._remember(start, root, terms, trail)
        return terms

    def _remember(self, start: Signature, root: Node, terms: list[Term], trail: Trail) -> None:
        if trail.by_tensor or any(operation(node) in _BY_TENSOR for node in trail.nodes):
            return
        own = self._surroundings.own
        numbers, path = {root: 0}, []
        for node in trail.nodes:  # parents come before their inputs
            if node not in numbers:
                return
            for place, (below, _) in enumerate(edges(node)):
                if below is not None and below in trail.nodes and below not in numbers:
                    numbers[below] = len(numbers)
                    path.append((numbers[node], place, _signature(below, own)))
        kept = tuple(
            (numbers[term.node or root], -1 if term.source is None else numbers[term.source], _forgotten(term))
            for term in terms
        )
        self._readings.insert(0, _Reading(start, tuple(path), kept))
        del self._readings[_KEEP:]


def _signature(node: Node, own: frozenset[int]) -> Signature:
    """Return all of a node that a reading may depend on, but for the tensors."""
    sort = type(node)
    kind = _kinds.get(sort) or _kind_of(node)
    if kind.leaf:
        return sort, is_parameter(node, own)
    metadata: Any = node
    inputs = node.next_functions
    return (
        sort if kind.name is None else kind.name,
        [result.shape for result in metadata._input_metadata],
        [place if n is not None else -1 for n, place in inputs],
        [is_parameter(n, own) for n, _ in inputs] if kind.layer else None,
        [_factor(node, which) for which in ("self", "other", "exponent")] if kind.factor else None,
        kind.settings(node) if kind.settings is not None else None,
    )


class _Kind(NamedTuple):
    """What there is to look at in a kind of node."""

    name: str | None  # where the type does not tell
    leaf: bool
    layer: bool  # whether its inputs are parameters matters
    factor: bool  # whether what it multiplies by is a number matters
    settings: Callable[[Node], object] | None  # its saved attributes that are not tensors


_kinds: dict[type, _Kind] = {}


def _kind_of(node: Node) -> _Kind:
    name = operation(node)
    saved = [attribute for attribute in dir(node) if attribute.startswith("_saved_")]
    settings = [attribute for attribute in saved if not hasattr(node, "_raw" + attribute)] if name not in MATMULS else []
    layer = name in MATMULS or name in NORMS or name == "Convolution" or name not in RULES
    told = type(node).__name__ == node.name().rpartition("::")[2] and not is_custom(node)
    kind = _Kind(None if told else node.name(), is_leaf(node), layer, name in _FACTORS, attrgetter(*settings) if settings else None)
    if told:
        _kinds[type(node)] = kind
    return kind


def _factor(node: Node, which: str) -> object:
    number = saved_number(node, which)
    if number is not None:
        return number
    tensor = saved_tensor(node, which)
    return None if tensor is None else (tensor.dim(), tensor.dtype)


def _forgotten(term: Term) -> Term:
    """Let go of the graph: what is kept must not keep activations alive."""
    return term._replace(node=None, source=None, value=None, count=0.0 if term.source else term.count)


def _refreshed(term: Term, node: Node, source: Node | None) -> Term:
    """Put the new graph's node and count into a remembered term."""
    if source is None:
        return term._replace(node=node)
    if operation(source) in NLL:
        return term._replace(node=node, source=source, count=targets(source))
    carried: Any = source
    return term._replace(node=node, source=source, kind=carried.kind, count=carried.count, value=carried.value)

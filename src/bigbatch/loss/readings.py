"""Reads losses, and remembers how a graph of the same kind and shapes was read.

Reading follows a graph operation by operation. A training loop builds the same graph every time, and ragged batches
build it in other shapes. So graphs of one kind, of the same operations in the same places, share one walk; what it
finds at each node (shapes, settings, constant factors) is the key of a reading. The same key has the same answer, but
for counts that are in tensors; and frozen weights, which are in no graph, must be found to be the model's again.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.loss import graph
from bigbatch.loss.count import Term
from bigbatch.loss.divisors import divided_by
from bigbatch.loss.graph import edges, is_number, operation, saved_tensor
from bigbatch.loss.origin import Precedents, Surroundings, Trail
from bigbatch.loss.reductions import targets
from bigbatch.loss.rules import MATMULS, NLL, PURE_POINTWISE
from bigbatch.loss.selections import rows_index
from bigbatch.loss.terms import read

_KINDS, _SHAPES = 32, 512  # how many kinds of graphs are remembered, and of each how many shapes
_BY_TENSOR = frozenset("Index IndexSelect IndexPut MaskedSelect IndexAdd IndexCopy".split())  # read by their indices
_OF_INPUTS = NLL | PURE_POINTWISE - {"Expand"} | frozenset("Softmax LogSoftmax".split())  # sizes that follow from those
_OURS = frozenset({"_Counted", "_BatchNorm"})
_UNSEEN, _NEW = -1, -2  # in the place of a node's number: it was not looked at; it is the next one

Inspection: TypeAlias = Callable[[Any], object]  # of a node
# An input: its type, which of its results it is, the number of its node, and how many inputs that has where it is new.
Input: TypeAlias = tuple[type, int, int, int]


class _Reading(NamedTuple):
    """One reading of a kind of graphs; nodes are numbered as the walk meets them."""

    terms: tuple[tuple[int, int | None, bool, Term], ...]  # its node, that of its count, whether it counts targets
    weights: tuple[tuple[int, str], ...]  # nodes, and which of their saved tensors is a frozen weight
    plain: bool  # whether it is one mean, over as many things each time, or over targets


class _Kind:
    """Graphs of the same operations in the same places."""

    def __init__(self, output: int, root: type, size: int, inputs: list[Input], looks: list[Any]) -> None:
        """Walk by `inputs`, those of each node in turn; what `looks` find there is the key of a reading."""
        self.output, self.root, self.size, self.inputs, self.looks = output, root, size, inputs, looks
        self.readings: dict[tuple[object, ...], _Reading] = {}

    def walk(self, root: Node | None, output: int) -> list[Node] | None:
        """Return the nodes of a graph of this kind; None where it is of another."""
        if root is None or type(root) is not self.root or output != self.output:
            return None
        nodes, found = [root], [*root.next_functions]
        if len(found) != self.size:
            return None
        for (below, number), (sort, place, index, size) in zip(found, self.inputs):  # noqa: B905 - it grows
            if type(below) is not sort or number != place:
                return None
            if index == _NEW:
                inputs = below.next_functions  # type: ignore[union-attr]  # None is never numbered
                if len(inputs) != size:
                    return None
                nodes.append(below)  # type: ignore[arg-type]
                found += inputs
            elif index != _UNSEEN and below is not nodes[index]:
                return None
        return nodes

    def key(self, nodes: list[Node]) -> tuple[object, ...]:
        """Return what there is to see at the nodes."""
        return tuple([look(nodes[at]) for at, look in self.looks])


class Reader:
    """Reads the losses of one accumulator."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Start with nothing remembered."""
        self._surroundings, self._is_weight = surroundings, surroundings.is_weight
        self._kinds: list[_Kind] = []
        self._precedents: Precedents = {}
        self._settings: dict[type, Inspection | None] = {}  # of a type of nodes
        self.fresh = False  # whether the latest loss looked unlike those before
        self.plain: object = None  # the latest reading, where `count_again` can count it
        self._latest: tuple[_Kind, tuple[object, ...], _Reading] | None = None  # of the plain one

    def read(self, loss: Tensor) -> list[Term]:
        """Return the terms of a loss, or raise a LossError that says what to type."""
        if graph.is_watched():
            with graph.unseen():
                return self._read(loss)
        return self._read(loss)

    def forget(self) -> None:
        """Read anew whatever comes."""
        self._kinds.clear()
        self.plain = None

    def count_again(self, loss: Tensor) -> Any:
        """Return the count of a loss that looks as the latest one did, a plain mean; None where it may be another.

        It makes no terms: small models feel that.
        """
        if self.plain is None or self._latest is None or graph.is_watched():
            return None
        kind, key, reading = self._latest
        nodes = kind.walk(loss.grad_fn, loss.output_nr)
        if nodes is None:
            return None
        for (at, look), seen in zip(kind.looks, key):  # noqa: B905 - hot, and as many
            if look(nodes[at]) != seen:
                return None
        _, source, _, term = reading.terms[0]
        return term.count if source is None else targets(nodes[source])

    def _read(self, loss: Tensor) -> list[Term]:
        root, output = loss.grad_fn, loss.output_nr
        for kind in self._kinds:
            nodes = kind.walk(root, output)
            if nodes is None:
                continue
            key = kind.key(nodes)
            reading = kind.readings.get(key)
            terms = self._again(reading, nodes) if reading is not None else None
            if terms is not None and reading is not None:
                self.fresh, self.plain = False, None
                if reading.plain:
                    self.plain, self._latest = reading, (kind, key, reading)
                return terms
        self.fresh, self.plain = True, None
        trail = Trail(self._surroundings, self._precedents)
        terms = read(loss, trail)
        if root is not None:
            self._remember(root, output, terms, trail)
        return terms

    def _again(self, reading: _Reading, nodes: list[Node]) -> list[Term] | None:
        """Return the terms of a graph that was read before; None where what lies in its tensors is of another kind."""
        for at, which in reading.weights:
            tensor = saved_tensor(nodes[at], which)
            if tensor is None or not self._is_weight(tensor):
                return None
        terms: list[Term] = []
        for at, source, of_targets, like in reading.terms:
            holder: Any = None if source is None else nodes[source]
            kind, count, value = like.kind, like.count, None
            if of_targets:
                count = targets(holder)
            elif like.divisor is not None:
                found = divided_by(holder, like.divisor)
                if found is None:
                    return None
                count = found
            elif holder is not None:
                kind, count, value = holder.kind, holder.count, holder.value
            name, divided, factors, doubtful = like.name, like.divided, like.factors, like.doubtful
            about, shared, divisor, chosen = like.about, like.shared, like.divisor, like.chosen
            node = nodes[at]
            terms.append(
                Term(node, kind, count, name, value, divided, factors, doubtful, holder, about, shared, divisor, chosen)
            )
        return terms

    def _remember(self, root: Node, output: int, terms: list[Term], trail: Trail) -> None:
        # Of a mean over nothing, as of an empty mask, nothing was looked at below.
        nothing = any(term.kind == "mean" and term.source is None and not term.count for term in terms)
        if trail.passing or nothing or not all(map(_is_told_by_type, trail.nodes)):
            return
        nodes = _with_parameters(trail.nodes)
        numbers: dict[Node | None, int] = {root: 0}
        inputs: list[Input] = []
        reached = [*edges(root)]
        for below, number in reached:  # it grows
            index, size = numbers.get(below, _UNSEEN), 0
            if below in nodes and index == _UNSEEN:
                further = edges(below)
                numbers[below], index, size = len(numbers), _NEW, len(further)
                reached += further
            inputs.append((type(below), number, index, size))
        if len(numbers) != len(nodes):
            return
        divisions = {term.source for term in terms}
        one_input = [node for node in trail.nodes if len(edges(node)) == 1]
        views = [edges(node)[0][0] for node in one_input if hasattr(node, "_saved_self_sym_sizes")]  # a setting tells
        looks = [
            (numbers[node], look)
            for node in trail.nodes
            for look in self._looks(node, node in divisions)
            if look is not _size or node not in views
        ]
        mine = output, type(root), len(edges(root)), inputs, looks
        kind = next((k for k in self._kinds if (k.output, k.root, k.size, k.inputs, k.looks) == mine), None)
        if kind is None:
            kind = _Kind(*mine)
            self._kinds.insert(0, kind)
            del self._kinds[_KINDS:]
        found = tuple(
            (
                numbers[term.node or root],
                None if term.source is None else numbers[term.source],
                term.source is not None and operation(term.source) in NLL,
                replace(term, node=None, source=None, value=None, count=term.count if term.source is None else 0.0),
            )  # which keeps no graph alive
            for term in terms
        )
        key = kind.key([node for node in numbers if node is not None])
        kind.readings.pop(key, None)
        weights = tuple((numbers[node], which) for node, which in trail.weights)
        counted = [term.source is None or operation(term.source) in NLL for term in terms if term.kind == "mean"]
        kind.readings[key] = _Reading(found, weights, counted == [True] and len(terms) == 1 and not weights)
        if len(kind.readings) > _SHAPES:
            del kind.readings[next(iter(kind.readings))]

    def _looks(self, node: Node, divides: bool) -> list[Inspection]:  # noqa: FBT001 - by a count, which is read anew
        """Return what there is to see of a node beside its type, and those of its inputs."""
        name, sort = operation(node), type(node)
        if graph.is_leaf(node):
            return []
        if sort not in self._settings:
            self._settings[sort] = _settings(node, name)
        looks = [self._settings[sort]]
        if name not in _OF_INPUTS or any(below is None for below, _ in edges(node)):
            looks.append(_size if graph.results(node) == 1 else _sizes)
        if name in {"Mul", "Div", "Pow"}:
            looks.append(_is_by_number if divides else _factors)
        return [look for look in looks if look is not None]


def _with_parameters(nodes: dict[Node, None]) -> dict[Node, None]:
    """Add what stands between nodes and the parameters below: a transpose of a weight, or of other samples.

    That a leaf is a parameter was seen at the first reading; a leaf in the same place is one, too.
    """
    found = dict(nodes)
    for node in nodes:
        for below, _ in edges(node):
            while below is not None and below not in found and operation(below) in graph.LOOKS_THROUGH:
                found[below] = None
                below = edges(below)[0][0]  # noqa: PLW2901 - from one to the next
    return found


def _is_told_by_type(node: Node) -> bool:
    """Tell whether nodes of the same type are the same operation, read alike whatever tensors they have saved."""
    name = operation(node)
    if name in _BY_TENSOR or (name in {"Gather", "ScatterAdd"} and rows_index(node) is not None):
        return False
    if graph.is_custom(node):
        return name in _OURS or graph.is_shared_by_all(node)
    return graph.is_stand_in(type(node)) or type(node).__name__ == node.name().rpartition("::")[2]


# What there is to see of a node.


def _size(node: Any) -> object:
    return tuple(node._input_metadata[0].shape)  # noqa: SLF001 - see graph.shape


def _sizes(node: Any) -> object:
    return tuple([tuple(result.shape) for result in node._input_metadata])  # noqa: SLF001 - see graph.shape


def _settings(node: Node, name: str) -> Inspection | None:
    """Inspect saved attributes that are not tensors: dimensions, reductions."""
    plain = [each for each in dir(node) if each.startswith("_saved_") and not hasattr(node, "_raw" + each)]
    if not plain or name in MATMULS:
        return None
    return attrgetter(*plain)


def _factors(node: Node) -> object:
    found: list[object] = []
    for which in ("self", "other", "exponent"):
        tensor = saved_tensor(node, which)
        if tensor is None:
            found.append(None)
        elif tensor.dim() or not tensor.is_cpu:
            found.append((tensor.dim(), tensor.dtype))
        else:
            found.append((tensor.item(), is_number(tensor)))
    return tuple(found)


def _is_by_number(node: Node) -> object:
    divisor = saved_tensor(node, "other")
    return divisor is None or is_number(divisor)

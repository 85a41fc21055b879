"""What a reading knows beside the graph; and what a value is made of: parameters, values of all micro-batches, data."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bigbatch.loss import graph, refusals
from bigbatch.loss.count import Arrival
from bigbatch.loss.graph import Edge, Shape, edges, operation, saved_tensor, shape
from bigbatch.loss.rules import MATMULS, MATRICES, PURE_POINTWISE, REDUCTIONS, VIEWS

# How a kind of graph was read where it could be read in one way only: that holds where it might be two.
Precedents: TypeAlias = dict[tuple[Hashable, ...], Any]


@dataclass(frozen=True)
class Surroundings:
    """What the reader knows beside the graph: whose parameters these are, and which tensors are the model's."""

    own: frozenset[int] = frozenset()  # ids of the optimizers' parameters: a plain tensor may be one
    is_weight: Callable[[Tensor], bool] = lambda _: False  # a frozen weight has no place in the graph
    micro_batch_norm: bool = False  # the user accepts BatchNorm over micro-batches
    time_first: bool = False  # a layer takes (time, batch, ...), so that samples may lie second
    is_one: Callable[[], bool] = lambda: False  # whether the micro-batch at hand is known to be one sample
    # A tensor that divides a sum is taken for its count, and what is set against samples for theirs: it is checked.
    divisors: bool = False


@dataclass
class Trail:
    """The nodes that a reading has looked at, in order, and the saved tensors that were found to be frozen weights."""

    known: Surroundings = field(default_factory=Surroundings)
    precedents: Precedents = field(default_factory=dict)
    nodes: dict[Node, None] = field(default_factory=dict)
    weights: list[tuple[Node, str]] = field(default_factory=list)
    unbound: set[Node] = field(default_factory=set)  # unbinds along the samples
    samples: set[int] = field(default_factory=set)  # how many there are
    crossed: bool = False  # a scalar has several rows of an unbind
    passing: bool = False  # what was found holds for this graph alone: it is not to be remembered

    def passed(self, node: Node) -> None:
        """Take note of a node."""
        self.nodes[node] = None

    def kind(self, *about: Hashable) -> tuple[Hashable, ...]:
        """Return the key of a precedent: of what, in graphs that are of one kind so far."""
        return (*about, *map(type, self.nodes))

    def is_as_before(self, about: Hashable, answer: object) -> bool:
        """Tell whether graphs of this kind have had the same answer; the first one settles it."""
        return bool(self.precedents.setdefault(self.kind(about), answer) == answer)


class Origin(Enum):
    """What a value may be made of, and of nothing else.

    WEIGHT is stricter than PARAMETERS: what has no gradient may be a batch's, and a layer's weight that depends on the
    batch couples its samples. So it must be a number that was written down, or a tensor of the model's own. A weight
    that stands BESIDE samples in a product may also hold others, of a parameter's size: what autograd does not see of
    a weight (a sign, a norm, an identity) is a parameter's more often than a batch's.
    """

    PARAMETERS = auto()  # and numbers: a regularizer, the same in every micro-batch
    SHARED = auto()  # values of all micro-batches, and perhaps parameters: the same in each
    WEIGHT = auto()  # parameters, frozen weights and written numbers: a layer's computed weight
    BESIDE = auto()  # such a weight, in a product with samples


_OF_VECTORS = frozenset("Dot Vdot Mv Addmv".split())
_NORMS = frozenset("NativeLayerNorm FusedRmsNorm NativeGroupNorm".split())
_PURE = PURE_POINTWISE | REDUCTIONS | VIEWS | MATRICES | frozenset(MATMULS)
_PURE |= frozenset("Unsqueeze Squeeze T Transpose Permute Slice Split Select Unbind Cat Stack Diagonal".split())
PURE_OF_WEIGHTS = _PURE | _OF_VECTORS | frozenset("WeightNormInterface Softmax Renorm Where".split())
_OF_SHARED = _NORMS | frozenset("Softmax LogSoftmax Index IndexSelect Gather Clamp ClampMin ClampMax".split())
_ALLOWED = {
    Origin.PARAMETERS: _PURE,
    Origin.SHARED: PURE_OF_WEIGHTS | _OF_SHARED,
    Origin.WEIGHT: PURE_OF_WEIGHTS,
    Origin.BESIDE: PURE_OF_WEIGHTS,
}
_WEIGHTS = frozenset({Origin.WEIGHT, Origin.BESIDE})
_NODES_OF_A_WEIGHT = 128  # more are a model's, not a weight's
_SAVED_AS = {  # under which names torch saves the two factors; others are `self` and `mat2`
    **dict.fromkeys(("Cdist", "EuclideanDist"), ("x1", "x2")),
    "Addmm": ("mat1", "mat2"),
    "Addmv": ("mat", "vec"),
    "Mv": ("self", "vec"),
    "Baddbmm": ("batch1", "batch2"),
    **dict.fromkeys(("Mul", "Div"), ("self", "other")),
}


def is_made_of(origin: Origin, edge: Edge, trail: Trail) -> bool:
    """Tell whether a value is made of this, and of nothing else."""
    looked = Trail(trail.known)
    found = _is_made_of(origin, edge, looked)
    if found or origin is Origin.PARAMETERS:  # else the reading does not depend on what was looked at
        trail.nodes.update(looked.nodes)
        trail.weights.extend(looked.weights)
    return found


def _is_made_of(origin: Origin, edge: Edge, looked: Trail) -> bool:
    stack, spread, shared = [edge[0]], set[Shape](), False
    while stack:
        node = stack.pop()
        if node is None or (origin in _WEIGHTS and len(looked.nodes) >= _NODES_OF_A_WEIGHT):
            return False
        if node in looked.nodes:
            continue
        looked.passed(node)
        if origin is Origin.SHARED and graph.is_shared_by_all(node):
            shared = True
        elif graph.is_leaf(node):
            if not graph.is_parameter(node, looked.known.own):
                return False
        else:
            free = _holds_others(origin, node, looked)
            if free is None or (free and origin is not Origin.BESIDE):
                return False
            spread |= {shape(node)} if free and not _keeps_size(node) else set()
            stack.extend(below for below, _ in edges(node) if below is not None)
    sizes = {tuple(graph.variable(node).shape) for node in looked.nodes if graph.is_leaf(node)} if spread else spread
    return spread <= sizes and (shared or origin is not Origin.SHARED)


def _holds_others(origin: Origin, node: Node, looked: Trail) -> bool | None:
    """Tell whether an operation has an operand without gradient that may be a sample; None where it may be a layer."""
    name = operation(node)
    if graph.is_custom(node):  # one that rounds weights, with its settings
        return False if origin is Origin.BESIDE and _keeps_size(node) else None
    if name not in _ALLOWED[origin]:
        return None  # below it is the model, and with it this micro-batch
    gradless = [place for place, (below, _) in enumerate(edges(node)) if below is None]
    if origin in _WEIGHTS:
        factors = MATMULS.get(name, (0, 1))
        free = not all(each in factors and _is_constant(node, name, factors.index(each), looked) for each in gradless)
    else:  # a 0-d tensor is compared with all others'; a norm may have no weights
        free = bool(gradless and shape(node)) and not by_number(node, name)
        free = free and not (origin is Origin.SHARED and name in _NORMS)
    return None if free and name in MATMULS.keys() - _OF_VECTORS else free


def _keeps_size(node: Node) -> bool:
    """Whether the result is as large as what came in with gradient, so that nothing else has spread it."""
    inputs = [shape(below, place) for below, place in edges(node) if below is not None]
    return shape(node) in inputs or operation(node) in _OF_VECTORS | {"Cat"}


def _is_constant(node: Node, name: str, place: int, looked: Trail) -> bool:
    """Tell whether an operand without gradient is a written number or the model's own."""
    if name == "Pow":
        return graph.python_number(node, "exponent") is not None
    if name not in MATMULS and name not in {"Mul", "Div"}:
        return False
    which = saved_factor(name, place)
    if name not in MATMULS and graph.python_number(node, which) is not None:
        return True
    tensor = saved_tensor(node, which)
    if tensor is None or not looked.known.is_weight(tensor):
        return False
    looked.weights.append((node, which))
    return True


def saved_factor(name: str, place: int) -> str:
    """Return the name under which a product saves its left (0) or right (1) factor."""
    return _SAVED_AS.get(name, ("self", "mat2"))[place]


def by_number(node: Node, name: str) -> bool:
    """Tell whether what has no gradient here is a number, as in `0.5 * p`."""
    names = ("other", "self", "exponent") if name in {"Mul", "Div", "Pow"} else ()
    return any(graph.saved_number(node, which) is not None for which in names)


# Frozen weights have no place in the graph, so they are known by their memory.

_COMPARED = 32  # numbers of a copy that are compared each time
_READ_EVERY = 16  # on a device, the result of comparisons is read once in as many


class FrozenWeights:
    """Answers whether a tensor is a parameter or buffer of the models, perhaps cast by autocast.

    Asked for every micro-batch, so what was found is kept: by weak reference, since memory that a weight has left
    may be given to a batch.
    """

    def __init__(self, models: Sequence[nn.Module], beside: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Take note of the models; their tensors are looked up when asked for, and those that they have `beside`."""
        self._models, self._beside = models, beside
        self._at: dict[int, weakref.ref[Tensor]] = {}
        self._casts: dict[tuple[torch.Size, torch.dtype], weakref.ref[Tensor]] = {}
        self._compared, self._same, self._arrival = 0, torch.tensor(data=True), Arrival()  # on a device

    def __call__(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of the models' own, or the same in every micro-batch as they are."""
        address = _address(tensor)
        own = self._at[address]() if address in self._at else None
        is_known = own is not None and _address(own) == address
        if graph.is_shared_value(tensor) or is_known or self._is_known_cast(tensor):
            return True
        # A weight may have been moved or loaded anew.
        self._at = {_address(own): weakref.ref(own) for own in (*self._own(), *self._beside())}
        return address in self._at or self._is_cast(tensor)

    def _is_known_cast(self, tensor: Tensor) -> bool:
        """Tell a new copy of a weight that was compared before, by some of its numbers (read later on a device)."""
        known = self._casts.get((tensor.shape, tensor.dtype))
        own = known() if known is not None else None
        if own is None:
            return False
        if tensor.is_cpu:
            return torch.equal(_some(own).to(tensor.dtype), _some(tensor))
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        self._same = (_some(own).to(tensor.dtype) == _some(tensor)).all() & self._same.to(tensor.device)
        if self._compared % _READ_EVERY == 0:
            if self._compared and not self._arrival.read():
                raise refusals.other_weight(tuple(tensor.shape))
            self._arrival.start(self._same)
        self._compared += 1
        return True

    def _is_cast(self, tensor: Tensor) -> bool:
        """Autocast copies a frozen weight; the copy is compared with it once, which waits for the device."""
        for own in self._own():
            if own.dtype != tensor.dtype and own.shape in {tensor.shape, tensor.shape[::-1]}:
                same = own if own.shape == tensor.shape else own.t()
                if torch.equal(same.to(tensor.dtype), tensor):
                    self._casts[tensor.shape, tensor.dtype] = weakref.ref(own)
                    return True
        return False

    def _own(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()


def _some(tensor: Tensor) -> Tensor:
    """Take a few numbers, the same of a matrix and of its transpose."""
    return tensor.diagonal()[:_COMPARED] if tensor.dim() > 1 else tensor.reshape(-1)[:_COMPARED]


def _address(tensor: Tensor) -> int:
    try:
        storage = tensor.untyped_storage()
        # One that was freed, as by FSDP after a forward, has no address; what held it is the same, and has one.
        return storage.data_ptr() or -int(storage._cdata)  # noqa: SLF001 - no public name
    except (RuntimeError, NotImplementedError):  # a wrapper without storage of its own
        return -id(tensor)

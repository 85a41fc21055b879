"""What a value is made of: of parameters alone, of values of all micro-batches, or of this micro-batch's data."""

from enum import Enum, auto

from torch.autograd.graph import Node

from bigbatch.loss.graph import (
    Edge,
    Shape,
    edges,
    is_custom,
    is_leaf,
    is_parameter,
    is_shared_by_all,
    operation,
    python_number,
    saved_number,
    saved_tensor,
    shape,
    variable,
)
from bigbatch.loss.operations import MATRICES, PURE_POINTWISE, REDUCTIONS, VIEWS
from bigbatch.loss.rules import MATMULS
from bigbatch.loss.trail import Trail


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
_PURE = (
    PURE_POINTWISE
    | REDUCTIONS
    | VIEWS
    | MATRICES
    | frozenset(MATMULS)
    | frozenset("Unsqueeze Squeeze T Transpose Permute Slice Split Select Unbind Cat Stack Diagonal".split())
)
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
# under which names torch saves the two factors, where it saves them
_SAVED_AS = {
    "Cdist": ("x1", "x2"),
    "EuclideanDist": ("x1", "x2"),
    "Addmm": ("mat1", "mat2"),
    "Addmv": ("mat", "vec"),
    "Mv": ("self", "vec"),
    "Baddbmm": ("batch1", "batch2"),
    "Mul": ("self", "other"),
    "Div": ("self", "other"),
}


def is_made_of(origin: Origin, edge: Edge, trail: Trail) -> bool:
    """Tell whether a value is made of this, and of nothing else."""
    looked = Trail(trail.known)
    found = _is_made_of(origin, edge, looked)
    if found or origin is Origin.PARAMETERS:  # else the reading does not depend on what was looked at
        trail.add(looked)
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
        if origin is Origin.SHARED and is_shared_by_all(node):
            shared = True
        elif is_leaf(node):
            if not is_parameter(node, looked.known.own):
                return False
        else:
            free = _unexplained(origin, node, looked)
            if free is None or (free and origin is not Origin.BESIDE):
                return False
            spread |= {shape(node)} if free and not _keeps_size(node) else set()
            stack.extend(below for below, _ in edges(node) if below is not None)
    sizes = {tuple(variable(node).shape) for node in looked.nodes if is_leaf(node)} if spread else spread
    return spread <= sizes and (shared or origin is not Origin.SHARED)


def _unexplained(origin: Origin, node: Node, looked: Trail) -> bool | None:
    """Tell whether an operation has an operand without gradient that may be a sample; None where it may be a layer."""
    name = operation(node)
    if is_custom(node):  # one that rounds weights, with its settings
        return False if origin is Origin.BESIDE and _keeps_size(node) else None
    if name not in _ALLOWED[origin]:
        return None  # below it is the model, and with it this micro-batch
    gradless = (place for place, (below, _) in enumerate(edges(node)) if below is None)
    free = not all(_is_fixed(origin, node, place, looked) for place in gradless)
    return None if free and name in MATMULS.keys() - _OF_VECTORS else free


def _is_fixed(origin: Origin, node: Node, place: int, looked: Trail) -> bool:
    """Tell whether an operand without gradient is no sample: a number, or for a weight a tensor of the model's own."""
    name = operation(node)
    if origin in _WEIGHTS:
        factors = MATMULS.get(name, (0, 1))
        return place in factors and _is_constant(node, name, factors.index(place), looked)
    # A 0-d tensor, which is compared with all others', or a norm without weights.
    return not shape(node) or by_number(node, name) or (origin is Origin.SHARED and name in _NORMS)


def _keeps_size(node: Node) -> bool:
    """Whether the result is as large as what came in with gradient, so that nothing else has spread it."""
    inputs = [shape(below, place) for below, place in edges(node) if below is not None]
    return shape(node) in inputs or operation(node) in _OF_VECTORS | {"Cat"}


def _is_constant(node: Node, name: str, place: int, looked: Trail) -> bool:
    """Tell whether an operand without gradient is a written number or the model's own."""
    if name == "Pow":
        return python_number(node, "exponent") is not None
    if name not in MATMULS and name not in {"Mul", "Div"}:
        return False
    which = saved_factor(name, place)
    if name not in MATMULS and python_number(node, which) is not None:
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
    if name not in {"Mul", "Div", "Pow"}:
        return False
    return any(saved_number(node, which) is not None for which in ("other", "self", "exponent"))

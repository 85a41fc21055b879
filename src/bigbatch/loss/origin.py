"""What is made of parameters alone: regularisers, and weights that a layer computes from its parameters."""

from collections.abc import Callable

from torch import Tensor
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

_PURE = (
    PURE_POINTWISE
    | REDUCTIONS
    | VIEWS
    | MATRICES
    | frozenset(MATMULS)
    | frozenset("Unsqueeze Squeeze T Transpose Permute Slice Split Select Unbind Cat Stack Diagonal".split())
)
_OF_VECTORS = frozenset("Dot Vdot Mv Addmv".split())
_PURE_OF_WEIGHTS = _PURE | _OF_VECTORS | frozenset("WeightNormInterface Softmax Renorm Where".split())
_NODES_OF_A_WEIGHT = 128  # more are a model's, not a weight's
_NORMS = frozenset("NativeLayerNorm FusedRmsNorm NativeGroupNorm".split())
_OF_SHARED = _NORMS | frozenset("Softmax LogSoftmax Index IndexSelect Gather Clamp ClampMin ClampMax".split())
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


def saved_factor(name: str, place: int) -> str:
    """Return the name under which a product saves its left (0) or right (1) factor."""
    return _SAVED_AS.get(name, ("self", "mat2"))[place]


def parameters_alone(edge: Edge, own: frozenset[int], trail: Trail) -> bool:
    """Tell whether a value is made of parameters and numbers, the same for every micro-batch."""
    stack, seen = [edge[0]], set[Node]()
    while stack:
        node = stack.pop()
        if node is None:
            return False
        trail.passed(node)
        if node in seen or is_leaf(node):
            if is_leaf(node) and not is_parameter(node, own):
                return False
            continue
        seen.add(node)
        name = operation(node)
        if name not in _PURE or is_custom(node):
            return False
        scalar = not shape(node)
        for below, _ in edges(node):
            if below is None and (scalar or by_number(node, name)):
                continue  # a 0-d tensor without gradient, or a Python number
            stack.append(below)
    return True


def made_of_shared(edge: Edge, own: frozenset[int], trail: Trail) -> bool:
    """Tell whether a value is made of values of all micro-batches, and perhaps of parameters: the same in each."""
    looked, found, stack = Trail(), False, [edge[0]]
    while stack:
        node = stack.pop()
        if node is None or node in looked.nodes:
            continue
        looked.passed(node)
        if is_shared_by_all(node):
            found = True
        elif is_leaf(node):
            if not is_parameter(node, own):
                return False
        elif is_custom(node) or operation(node) not in _PURE_OF_WEIGHTS | _OF_SHARED:
            return False  # a layer: below it is the model, and with it this micro-batch
        else:
            inputs = [below for below, _ in edges(node)]
            affine = operation(node) in _NORMS  # with weights or without
            number = not shape(node) or by_number(node, operation(node))
            if None in inputs and not affine and not number:
                return False  # what has no gradient may be this micro-batch's; numbers are compared with all others'
            stack.extend(inputs)
    if found:
        trail.add(looked)
    return found


def computed_weight(  # noqa: C901, PLR0911, PLR0912 - one way out per doubt
    edge: Edge, own: frozenset[int], is_weight: Callable[[Tensor], bool], trail: Trail, *, beside: bool = False
) -> bool:
    """Tell whether a layer's weight was computed from parameters, frozen weights and numbers, and from nothing else.

    Stricter than `parameters_alone`: what has no gradient may be a batch's, and a layer's weight that depends on the
    batch couples its samples. So it must be a number that was written down, or a tensor of the model's own. A weight
    that stands `beside` samples in a product may also hold others, of a parameter's size: what autograd does not see of
    a weight (a sign, a norm, an identity) is a parameter's more often than a batch's.
    """
    looked = Trail()  # where the answer is no, the reading does not depend on what was looked at
    stack, spread = [edge[0]], set[Shape]()
    while stack and len(looked.nodes) < _NODES_OF_A_WEIGHT:
        node = stack.pop()
        if node is None:
            return False
        if node in looked.nodes:
            continue
        looked.passed(node)
        if is_leaf(node):
            if not is_parameter(node, own):
                return False
            continue
        name = operation(node)
        if is_custom(node) and not (beside and _keeps_size(node)):
            return False
        if name not in _PURE_OF_WEIGHTS and not is_custom(node):
            return False
        factors = MATMULS.get(name, (0, 1))
        for place, (below, _) in enumerate(edges(node)):
            if below is not None:
                stack.append(below)
            elif is_custom(node):
                continue  # settings of a function that rounds weights
            elif place in factors and _constant(node, name, factors.index(place), is_weight, looked):
                continue
            elif not beside or (name in MATMULS and name not in _OF_VECTORS):
                return False
            elif not _keeps_size(node):
                spread.add(shape(node))
    if stack or not spread <= {tuple(variable(node).shape) for node in looked.nodes if is_leaf(node)}:
        return False
    trail.add(looked)
    return True


def _keeps_size(node: Node) -> bool:
    """Whether the result is as large as what came in with gradient, so that nothing else has spread it."""
    inputs = [shape(below, place) for below, place in edges(node) if below is not None]
    return shape(node) in inputs or operation(node) in _OF_VECTORS | {"Cat"}


def _constant(node: Node, name: str, place: int, is_weight: Callable[[Tensor], bool], looked: Trail) -> bool:
    """Tell whether an operand without gradient is a written number or the model's own."""
    if name == "Pow":
        return python_number(node, "exponent") is not None
    if name not in MATMULS and name not in {"Mul", "Div"}:
        return False
    which = saved_factor(name, place)
    if name not in MATMULS and python_number(node, which) is not None:
        return True
    tensor = saved_tensor(node, which)
    if tensor is None or not is_weight(tensor):
        return False
    looked.weights.append((node, which))
    return True


def by_number(node: Node, name: str) -> bool:
    """Tell whether what has no gradient here is a number, as in `0.5 * p`."""
    if name not in {"Mul", "Div", "Pow"}:
        return False
    return any(saved_number(node, which) is not None for which in ("other", "self", "exponent"))

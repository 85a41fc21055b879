"""Where the weight of a layer comes from: it may be computed on the way, as by LoRA, DoRA or a parametrization.

What carries gradient is followed down to the parameters. What has no gradient has no place in the graph: it may be a
number, a tensor of the model's own, or something of this batch. So there are four answers, and only the first is proof.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum, auto
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.reading.graph import (
    Edge,
    edges,
    is_custom,
    is_leaf,
    is_parameter,
    operation,
    python_number,
    saved,
    saved_tensor,
    shape,
)
from bigbatch.reading.layout import is_whole
from bigbatch.reading.operations import MASKED_POINTWISE, PURE_POINTWISE
from bigbatch.reading.parameters import PURE_OF_WEIGHTS, saved_factor
from bigbatch.reading.rules import MATMULS
from bigbatch.reading.trail import Trail

_INDEXED = {"Index": "indices", "IndexSelect": "index", "Gather": "index", "Embedding": "indices"}
_MASKS = {"Where": "condition", "MaskedFill": "mask"}
_DOTS = {"Dot": ("self", "tensor"), "Vdot": ("self", "other")}
_WRITES = frozenset("IndexPut CopySlices Scatter ScatterAdd IndexCopy IndexAdd IndexFill".split())
# Functions of their inputs alone, whatever they do with rows: none of a weight's is a sample's.
_OF_WEIGHTS = (
    PURE_OF_WEIGHTS
    | MASKED_POINTWISE
    | _WRITES
    | frozenset(_INDEXED)
    | frozenset(_DOTS)
    | frozenset(
        "LinalgHouseholderProduct LinalgSolveEx LinalgSolveTriangular LinalgInvEx LinalgQr LinalgSvd LinalgEigh "
        "LinalgCholeskyEx LinalgPinv LinalgDet LinalgLuFactorEx LinalgLu LinalgCross FftR2C FftC2R FftC2C "
        "ViewAsComplex ViewAsReal DiagEmbed BlockDiag Trace Ger Repeat Roll Flip Rot90 ConstantPadNd AsStrided "
        "Softmax LogSoftmax Cumsum Cumprod Logcumsumexp Renorm SplitWithSizes "
        "FakeQuantizePerTensorAffineCachemask FakeQuantizePerChannelAffineCachemask".split()
    )
)


class Origin(IntEnum):
    """What a value is made of, from best to worst."""

    PARAMETERS = auto()  # and of numbers and tensors of the model's own: the same in every micro-batch
    BESIDE = auto()  # beside parameters of numbers without gradient, which have no part in its shape
    UNCLEAR = auto()  # of parameters, and of rows or vectors without gradient: of the model or of this batch
    DATA = auto()  # or of something that is not known


class Weight(NamedTuple):
    """Where a value comes from, and by which operation that is not better."""

    origin: Origin
    by: str = ""


class Known(NamedTuple):
    """How what has no gradient is known to be the model's."""

    own: frozenset[int]
    is_weight: Callable[[Tensor], bool]
    is_copy: Callable[[Tensor], bool]


def weight_of(edge: Edge, known: Known, trail: Trail) -> Weight:
    """Tell what a value was computed from."""
    looked, found = Trail(), Weight(Origin.PARAMETERS)
    stack = [edge]
    while stack:
        node, output = stack.pop()
        if node is None:
            return Weight(Origin.DATA)
        if node in looked.nodes:
            continue
        looked.passed(node)
        if is_leaf(node):
            if not is_parameter(node, known.own):
                return Weight(Origin.DATA)
            continue
        name = operation(node)
        if name not in _OF_WEIGHTS or is_custom(node):
            return Weight(Origin.DATA, name)
        here = _beside(node, output, name, known, looked)
        if here is Origin.DATA:
            return Weight(here, name)
        if here > found.origin:
            found = Weight(here, name)
        stack.extend(below for below in edges(node) if below[0] is not None)
    trail.add(looked)  # where the answer is data, the reading does not depend on what was looked at
    return found


def _beside(node: Node, output: int, name: str, known: Known, looked: Trail) -> Origin:  # noqa: PLR0911 - a way out per kind
    """Tell what has a part in this operation, and no gradient."""
    absent = [place for place, (below, _) in enumerate(edges(node)) if below is None]
    if name in _INDEXED:
        chosen = all(_is_known(index, known, looked) or _all_rows(index, node) for index in _indices(node, name))
        return Origin.PARAMETERS if chosen and not absent else Origin.UNCLEAR
    if name in _WRITES:
        return Origin.UNCLEAR if 0 in absent else Origin.BESIDE
    if name in MATMULS:
        factors = MATMULS[name]
        found = [_factor(node, name, factors.index(place), known, looked) for place in absent if place in factors]
        return max(found + [Origin.BESIDE for place in absent if place not in factors], default=Origin.PARAMETERS)
    if name in _DOTS:
        known_ones = all(_is_known(saved_tensor(node, _DOTS[name][place]), known, looked) for place in absent)
        return Origin.PARAMETERS if known_ones else Origin.UNCLEAR
    if name in PURE_POINTWISE or name in MASKED_POINTWISE:
        mask = _MASKS.get(name)
        constant = all(_is_constant(node, name, place, known, looked) for place in absent)
        if constant and (name not in MASKED_POINTWISE or _owns(node, mask, known, looked)):
            return Origin.PARAMETERS
        return Origin.UNCLEAR if _grows(node, output) and name != "Expand" else Origin.BESIDE
    return Origin.UNCLEAR if absent else Origin.PARAMETERS


def _factor(node: Node, name: str, place: int, known: Known, looked: Trail) -> Origin:
    """A frozen weight, a vector of the model's own (a spectral norm's), or a batch."""
    which = saved_factor(name, place)
    if _owns(node, which, known, looked) or _is_known(saved_tensor(node, which), known, looked):
        return Origin.PARAMETERS
    return Origin.UNCLEAR if name in {"Mv", "Addmv"} else Origin.DATA


def _owns(node: Node, which: str | None, known: Known, looked: Trail) -> bool:
    """Tell whether a saved tensor is the model's own; it is looked at again whenever the reading is used again."""
    tensor = saved_tensor(node, which) if which is not None else None
    if which is None or tensor is None or not known.is_weight(tensor):
        return False
    looked.weights.append((node, which))
    return True


def _is_known(tensor: Tensor | None, known: Known, looked: Trail) -> bool:
    """Tell whether a tensor is the model's own or has its numbers; such a reading is not used again."""
    if tensor is None or not (known.is_weight(tensor) or known.is_copy(tensor)):
        return False
    looked.by_value = True
    return True


def _is_constant(node: Node, name: str, place: int, known: Known, looked: Trail) -> bool:
    """Tell whether an operand without gradient is a written number or the model's own."""
    if name == "Pow":
        return python_number(node, "exponent") is not None
    if name not in {"Mul", "Div"}:
        return False
    which = saved_factor(name, place)
    return python_number(node, which) is not None or _owns(node, which, known, looked)


def _indices(node: Node, name: str) -> Iterator[Tensor | None]:
    """Give what rows were taken by; None for what cannot be looked at."""
    if name != "Index":
        yield saved_tensor(node, _INDEXED[name])
        return
    found = saved(node, "indices") if getattr(node, "_raw_saved_indices", None) is not None else None
    yield from (index for index in found or [None] if found is None or index is not None)


def _all_rows(index: Tensor | None, node: Node) -> bool:
    """Tell whether all rows of a table were taken in their order, as `embedding(torch.arange(classes))` does."""
    below, place = edges(node)[0]
    rows = shape(below, place)[:1] if below is not None else ()
    return index is not None and index.dim() == 1 and rows == tuple(index.shape) and is_whole(index, rows[0])


def _grows(node: Node, output: int) -> bool:
    """Tell whether a dimension of the result is as long as no input that carries gradient."""
    sizes = shape(node, output)
    given = [shape(below, place) for below, place in edges(node) if below is not None]
    for back, size in enumerate(reversed(sizes), 1):
        if size > 1 and not any(len(each) >= back and each[-back] == size for each in given):
            return True
    return False

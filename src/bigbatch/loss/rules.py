"""What an operation does to samples: given the layout of its result, the layouts of its inputs.

Most operations leave some dimensions as they are and mix the others: `mixes` makes their rules. `RULES` has the rule of
each operation by its name; the reader refuses an operation without a rule.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias, TypeVar

from torch.autograd.graph import Node

from bigbatch.loss.graph import Edge, Shape, edges, operation, saved, saved_dim, saved_dims, shape, signed, size_of
from bigbatch.loss.layout import (
    PICKED,
    SHARED,
    Axis,
    Dim,
    Layout,
    broadcast,
    mix,
    mixed,
    reshaped,
    without_dim,
    without_slivers,
)

Inputs: TypeAlias = list[tuple[Edge, Layout]]
Rule: TypeAlias = Callable[[Node, int, Layout], Inputs]  # of a node, the number of one of its results, its layout
Below: TypeAlias = Callable[[Node, Layout, Shape], Layout]  # of an operation with one input, given that input's shape
_Rule = TypeVar("_Rule", bound=Rule)

RULES: dict[str, Rule] = {}
NONE, MEAN, SUM = range(3)  # how torch writes a fused loss's reduction
BY_CONSTANT = "Solve"

NLL = frozenset("NllLoss NllLoss2D".split())
POINTWISE_LOSSES = frozenset(
    "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss".split()
)
ROW_LOSSES = frozenset("MultiMarginLoss MultilabelMarginLoss".split())
# Pure functions of their inputs alone: nothing but parameters below them means a regulariser.
PURE_POINTWISE = frozenset(
    "Add Sub Rsub Mul Div Pow Exp Exp2 Expm1 Log Log2 Log10 Log1P Sqrt Rsqrt Neg Abs Sgn Sign Sin Cos Tan Asin "
    "Acos Atan Atan2 Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid LogSigmoid Softplus Relu LeakyRelu Elu Celu Gelu "
    "Silu Mish Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Threshold PreluKernel Clamp ClampMin ClampMax "
    "Lerp Addcmul Addcdiv Maximum Minimum Fmax Fmin Erf Erfc Erfinv Reciprocal ToCopy Clone Alias Logaddexp "
    "Logaddexp2 Hypot Sinc Logit Digamma Lgamma Polygamma Xlogy SpecialXlog1Py SpecialEntr SpecialErfcx "
    "SpecialNdtri SpecialLogNdtr NanToNum Round Floor Ceil Trunc Frac Fmod Remainder Expand Complex Polar Angle Conj "
    "Copysign Tril Triu".split()
)
# Pointwise, with an input that the graph does not show: a mask, a condition, noise.
MASKED_POINTWISE = frozenset("Where MaskedFill NativeDropout FusedDropout RreluWithNoise".split())
REDUCTIONS = frozenset(
    "Sum Mean Prod Var Std VarMean StdMean Logsumexp Amax Amin Max Min Median Nanmedian Norm LinalgVectorNorm "
    "Nansum Kthvalue Mode Aminmax".split()
)
VIEWS = frozenset("View UnsafeView ReshapeAlias".split())
MATRICES = frozenset(
    "LinalgCholeskyEx LinalgInvEx LinalgDet LinalgSlogdet LinalgSvd LinalgEigh LinalgEig LinalgQr LinalgSolveEx "
    "LinalgSolveTriangular LinalgMatrixExp LinalgLu LinalgHouseholderProduct CholeskySolve CholeskyInverse".split()
)
MATMULS: dict[str, tuple[int, int]] = {  # which inputs are the left and the right factor
    **dict.fromkeys(("Mm", "Bmm", "Mv", "Cdist"), (0, 1)),
    **dict.fromkeys(("Addmm", "Baddbmm", "Addmv"), (1, 2)),
    "EuclideanDist": (0, 1),  # of many rows
    "Linear": (0, 1),  # ours, in execute.precast; its right factor lies transposed, and is always a parameter
}
NORMS = frozenset("NativeLayerNorm FusedRmsNorm NativeGroupNorm NativeBatchNorm CudnnBatchNorm MiopenBatchNorm".split())


def known(names: str | Iterable[str]) -> Callable[[_Rule], _Rule]:
    """Enter a rule for operations of these names."""

    def enter(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names.split() if isinstance(names, str) else names, rule))
        return rule

    return enter


def of_one(names: str | Iterable[str]) -> Callable[[Below], Rule]:
    """Make and enter the rule of operations with one input."""

    def make(below: Below) -> Rule:
        def rule(node: Node, _output: int, layout: Layout) -> Inputs:
            edge = edges(node)[0]
            return [(edge, below(node, layout, size_of(edge)))]

        return known(names)(rule)

    return make


def mixes(
    names: str | Iterable[str], dims_of: Callable[[Node, Shape], Collection[int]], *, all_inputs: bool = True
) -> Rule:
    """Make and enter the rule of operations that mix some dimensions, of all inputs or of the first, beside weights."""

    def rule(node: Node, _output: int, layout: Layout) -> Inputs:
        name, result = operation(node), list[tuple[Edge, Layout]]()
        for place, edge in enumerate(edges(node)):
            sizes = size_of(edge)
            first = all_inputs or not place
            result.append((edge, mix(layout, sizes, dims_of(node, sizes), name) if first else mixed(sizes, name)))
        return result

    return known(names)(rule)


# Softmax, sorting, cumulative sums, gathering; a number has no dimension to mix.
along = mixes(
    "Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp Cummax Cummin Sort Topk Glu Scatter ScatterReduce "
    "IndexFill",
    lambda node, sizes: {saved_dim(node, "dim", len(sizes))} if sizes else (),
)
# Dot products: batch and head stay, positions are mixed.
mixes(
    "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention "
    "ScaledDotProductCudnnAttention",
    lambda _, sizes: range(2, len(sizes)),
)
# Samples stay; channels and positions are mixed.
mixes("Convolution NativeGroupNorm", lambda _, sizes: range(1, len(sizes)), all_inputs=False)
# Normalized over the last dimensions, or all that a sample has.
mixes(
    "NativeLayerNorm FusedRmsNorm",
    lambda node, sizes: range(len(sizes) - len(saved(node, "normalized_shape", (0,))), len(sizes)),
    all_inputs=False,
)
# Rows in another order.
mixes("Flip Roll", lambda node, sizes: {signed(d) % len(sizes) for d in saved(node, "dims") or range(len(sizes))})
# Padded dimensions no longer line up.
mixes("ConstantPadNd", lambda node, sizes: [d for d, size in enumerate(sizes) if size != shape(node)[d]])
# Each slice along one dimension gets a norm of its own: all the others are mixed.
mixes("Renorm", lambda node, sizes: {*range(len(sizes))} - {saved_dim(node, "dim", len(sizes))})


@known("Pdist Dot Vdot")
def everything(node: Node, _output: int, _layout: Layout) -> Inputs:
    """Each element comes from all elements."""
    return [(edge, mixed(size_of(edge), operation(node))) for edge in edges(node)]


# Multi-class margins: one value a row, from the whole row.
_per_sample = of_one(ROW_LOSSES)(lambda node, layout, sizes: (*layout[:1], *mixed(sizes[1:], operation(node))))


def _unless_reduced(names: Iterable[str], rule: Rule) -> Rule:
    """Enter the rule of losses: with a reduction of their own they mix everything."""
    return known(names)(lambda *given: (rule if saved(given[0], "reduction") == NONE else everything)(*given))


@known(PURE_POINTWISE | MASKED_POINTWISE)
def pointwise(node: Node, output: int, layout: Layout) -> Inputs:
    """Each element comes from the elements at its place."""
    out, name = shape(node, output), operation(node)
    return [(edge, broadcast(layout, size_of(edge), out, name) if edge[0] else ()) for edge in edges(node)]


@of_one(NLL)
def _nll(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Pick each row's target: samples stay, classes are mixed."""
    name = operation(node)
    return (*layout[:1], *mixed(sizes[1:2], name), *layout[1:]) if len(sizes) > 1 else mixed(sizes, name)


fused_loss = _unless_reduced(POINTWISE_LOSSES, pointwise)
_unless_reduced(ROW_LOSSES, _per_sample)
_unless_reduced(NLL, _nll)


# Reshapes: the same elements in the same order.
of_one(VIEWS)(lambda node, layout, sizes: reshaped(layout, sizes, operation(node)))
# What puts a dimension in, which goes; all inputs of a stack have gone there.
of_one("Unsqueeze")(lambda node, layout, _sizes: without_dim(layout, saved_dim(node, "dim", len(layout))))
known("Stack")(
    lambda node, _, layout: [
        (edge, without_dim(layout, saved_dim(node, "dim", len(layout)))) for edge in edges(node) if edge[0] is not None
    ]
)
# Windows over one dimension, put last: that dimension is mixed.
of_one("Unfold")(
    lambda node, layout, sizes: mix(layout, sizes, {saved_dim(node, "dimension", len(sizes))}, operation(node))
)
# A complex tensor as pairs of numbers, put last; and back.
of_one("ViewAsReal")(lambda _node, layout, _sizes: layout[:-1])
of_one("ViewAsComplex")(lambda node, layout, _sizes: (*layout, *mixed((2,), operation(node))))


@of_one("Squeeze")
def _squeeze(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Put the dimensions of size 1 back that were dropped."""
    dropped = {d for d in saved_dims(node, len(sizes)) if sizes[d] == 1}
    kept = iter(layout)
    return tuple(((1, PICKED),) if d in dropped else next(kept) for d in range(len(sizes)))


@of_one("T Transpose")
def _transpose(node: Node, layout: Layout, _sizes: Shape) -> Layout:
    """Swap two dimensions back."""
    if operation(node) == "T":
        return layout[::-1]
    a, b = saved_dim(node, "dim0", len(layout)), saved_dim(node, "dim1", len(layout))
    order = list(layout)
    order[a], order[b] = order[b], order[a]
    return tuple(order)


@of_one("Permute")
def _permute(node: Node, layout: Layout, _sizes: Shape) -> Layout:
    """Put permuted dimensions back."""
    places = [signed(dim) % len(layout) for dim in saved(node, "dims")]
    return tuple(layout[places.index(dim)] for dim in range(len(layout)))


@of_one(REDUCTIONS | frozenset("FftR2C FftC2C FftC2R".split()))
def _reduction(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Sums, norms, maxima over some dimensions: those are mixed."""
    name = operation(node)
    return unreduced(node, layout, sizes, lambda dim: ((sizes[dim], name),)) if layout else mixed(sizes, name)


def unreduced(node: Node, layout: Layout, sizes: Shape, dim_of: Callable[[int], Dim]) -> Layout:
    """Put the dimensions back that a reduction took away, as `dim_of` makes them of their number."""
    dims, rest = saved_dims(node, len(sizes)), iter(layout)
    keep = bool(saved(node, "keepdim")) or len(layout) == len(sizes)
    result: list[Dim] = []
    for dim in range(len(sizes)):
        kept = next(rest, ()) if keep or dim not in dims else ()
        result.append(dim_of(dim) if dim in dims else kept)
    return tuple(result)


@known(
    "AvgPool2D AvgPool3D MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveAvgPool2D AdaptiveAvgPool3D "
    "AdaptiveMaxPool2D AdaptiveMaxPool3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D "
    "UpsampleBilinear2D UpsampleBicubic2D UpsampleTrilinear3D ReflectionPad1D ReflectionPad2D ReplicationPad1D "
    "ReplicationPad2D ReflectionPad3D ReplicationPad3D UpsampleNearestExact1D UpsampleNearestExact2D "
    "UpsampleNearestExact3D UpsampleBilinear2DAa UpsampleBicubic2DAa FractionalMaxPool2D "
    "PixelShuffle PixelUnshuffle Im2Col Col2Im GridSampler2D"
)
def _spatial(node: Node, _output: int, layout: Layout) -> Inputs:
    """Pooling, padding and interpolation: batch and channel stay, positions are mixed; a grid's, too."""
    name, result = operation(node), list[tuple[Edge, Layout]]()
    for place, edge in enumerate(edges(node)):
        sizes = size_of(edge)
        batched = f"{len(sizes) - 2}D" in name or "D" not in name  # an image alone is (channels, height, width)
        kept = 2 if place == 0 and batched and shape(node)[1:2] == sizes[1:2] else 1
        result.append((edge, (*layout[:kept], *mixed(sizes[kept:], name)) if edge[0] else ()))
    return result


@known(MATMULS)
def _matmul(node: Node, _output: int, layout: Layout) -> Inputs:
    """Rows of the left factor, columns of the right one; the inner dimension is mixed."""
    name = operation(node)
    left, right = MATMULS[name]
    layout = (*without_slivers(layout[:-2]), *layout[-2:])  # an einsum may be a batch of one product
    result: Inputs = []
    for place, edge in enumerate(edges(node)):
        sizes = size_of(edge)
        below = mixed(sizes, name)
        if edge[0] is None:
            below = ()
        elif place == left:
            below = (*layout[: len(sizes) - 1], *below[-1:])
        elif place == right and len(sizes) > 1:
            # Rows of one factor against rows of the other: what mixes them further up is not to blame.
            rows = layout[-1] if any(isinstance(tag, Axis) for _, tag in layout[-1]) else below[-1]
            last = (rows, below[-2]) if name in {"Cdist", "EuclideanDist"} else (below[-2], rows)
            below = (*(layout[:-2] if len(layout) == len(sizes) else below[:-2]), *last)  # a plain matrix has no batch
        elif place != right:  # what was added
            below = broadcast(layout, sizes, shape(node), name)
        result.append((edge, below))
    return result


@known(MATRICES)
def _matrices(node: Node, _output: int, layout: Layout) -> Inputs:
    """Inverses, determinants, solutions: what is done to each matrix of a batch; rows and columns are mixed.

    Each column of a right side has a solution of its own; a matrix without gradient may be a constant, or a sample's.
    """
    name, result, inputs = operation(node), list[tuple[Edge, Layout]](), edges(node)
    batch = max(len(size_of(edge)) for edge in inputs) - 2
    columns = name == "LinalgSolveTriangular" and saved(node, "left")
    last = without_slivers(layout[-1:]) if inputs[0][0] is not None else mixed(shape(node)[-1:], BY_CONSTANT)
    for place, edge in enumerate(inputs):
        sizes = size_of(edge)
        apart = len(sizes) > batch and sizes[:batch] == shape(node)[:batch]
        below = (*layout[:batch], *mixed(sizes[batch:], name)) if apart else mixed(sizes, name)
        result.append((edge, (*below[:-1], *last) if columns and place else below))
    return result


@of_one("DiagEmbed")
def _diag_embed(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """A dimension put on the diagonal of two, which mix it."""
    dims = saved_dim(node, "dim1", len(layout)), saved_dim(node, "dim2", len(layout))
    return (*(dim for d, dim in enumerate(layout) if d not in dims), *mixed(sizes[-1:], operation(node)))


@of_one("CtcLoss CudnnCtcLoss")
def _ctc(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """One value a sequence, from log-probabilities of shape (time, batch, classes)."""
    if len(sizes) != len(("time", "batch", "classes")) or not layout:
        return mixed(sizes, operation(node))
    # Time comes first here, and is known not to hold samples: these lie behind it.
    return ((sizes[0], SHARED),), layout[0], ((sizes[2], operation(node)),)


@known("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm")
def _batch_norm(node: Node, _output: int, layout: Layout) -> Inputs:
    """Batch statistics mix the samples; running statistics do not."""
    (first, *rest), name = edges(node), operation(node)
    if saved(node, "training"):
        sizes = shape(node)
        # instance_norm is a batch_norm of one batch with all samples' channels side by side
        layout = (((sizes[0], name if sizes[0] > 1 else PICKED),), layout[1], *mixed(sizes[2:], name))
    return [(first, layout), *((edge, mixed(size_of(edge), name)) for edge in rest)]

"""What an operation does to samples: given the layout of its result, the layouts of its inputs.

Most operations leave some dimensions as they are and mix the others: `mixes` makes their rules.
"""

from collections.abc import Callable, Collection
from typing import TypeAlias

from torch.autograd.graph import Node

from bigbatch.loss.graph import Edge, Shape, edges, operation, saved, saved_dim, saved_dims, shape, signed
from bigbatch.loss.layout import PICKED, SHARED, Axis, Dim, Layout, broadcast, mix, mixed, reshaped, without_slivers

Inputs: TypeAlias = list[tuple[Edge, Layout]]
Rule: TypeAlias = Callable[[Node, int, Layout], Inputs]

NONE, MEAN, SUM = range(3)  # how torch writes a fused loss's reduction

POINTWISE_LOSSES = frozenset(
    "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss".split()
)
ROW_LOSSES = frozenset("MultiMarginLoss MultilabelMarginLoss".split())
NLL = frozenset("NllLoss NllLoss2D".split())

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
ALONG = frozenset(
    "Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp Cummax Cummin Sort Topk Glu "
    "Scatter ScatterReduce IndexFill".split()
)
# Of rows, by an index that is in no graph.
POOLING = frozenset("IndexAdd ScatterAdd ScatterReduce IndexCopy IndexPut".split())
VIEWS = frozenset("View UnsafeView ReshapeAlias".split())
SPATIAL = frozenset(
    "AvgPool2D AvgPool3D MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveAvgPool2D AdaptiveAvgPool3D "
    "AdaptiveMaxPool2D AdaptiveMaxPool3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D "
    "UpsampleBilinear2D UpsampleBicubic2D UpsampleTrilinear3D ReflectionPad1D ReflectionPad2D ReplicationPad1D "
    "ReplicationPad2D ReflectionPad3D ReplicationPad3D UpsampleNearestExact1D UpsampleNearestExact2D "
    "UpsampleNearestExact3D UpsampleBilinear2DAa UpsampleBicubic2DAa FractionalMaxPool2D "
    "PixelShuffle PixelUnshuffle Im2Col Col2Im GridSampler2D".split()
)
FOURIER = frozenset("FftR2C FftC2C FftC2R".split())
MATRICES = frozenset(
    "LinalgCholeskyEx LinalgInvEx LinalgDet LinalgSlogdet LinalgSvd LinalgEigh LinalgEig LinalgQr LinalgSolveEx "
    "LinalgSolveTriangular LinalgMatrixExp LinalgLu LinalgHouseholderProduct CholeskySolve CholeskyInverse".split()
)
ATTENTION = frozenset(
    "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention "
    "ScaledDotProductCudnnAttention".split()
)

MATMULS: dict[str, tuple[int, int]] = {  # which inputs are the left and the right factor
    "Mm": (0, 1),
    "Addmm": (1, 2),
    "Bmm": (0, 1),
    "Baddbmm": (1, 2),
    "Mv": (0, 1),
    "Addmv": (1, 2),
    "Cdist": (0, 1),
    "EuclideanDist": (0, 1),  # of many rows
    "Linear": (0, 1),  # ours, in execute.precast; its right factor lies transposed, and is always a parameter
}


def size_of(edge: Edge) -> Shape:
    """Return the shape of an input; () for one without gradient."""
    node, output = edge
    return shape(node, output) if node is not None else ()


def of_one(below: Callable[[Node, Layout, Shape], Layout]) -> Rule:
    """Make the rule of an operation with one input, given that input's layout by its shape."""

    def rule(node: Node, _output: int, layout: Layout) -> Inputs:
        edge = edges(node)[0]
        return [(edge, below(node, layout, size_of(edge)))]

    return rule


def mixes(dims_of: Callable[[Node, Shape], Collection[int]], *, all_inputs: bool = True) -> Rule:
    """Make the rule of an operation that mixes some dimensions, of all inputs or of the first: the rest is weights."""

    def rule(node: Node, _output: int, layout: Layout) -> Inputs:
        name, result = operation(node), list[tuple[Edge, Layout]]()
        for place, edge in enumerate(edges(node)):
            sizes = size_of(edge)
            first = all_inputs or not place
            result.append((edge, mix(layout, sizes, dims_of(node, sizes), name) if first else mixed(sizes, name)))
        return result

    return rule


# Softmax, sorting, cumulative sums, gathering; a number has no dimension to mix.
along = mixes(lambda node, sizes: {saved_dim(node, "dim", len(sizes))} if sizes else ())
# Dot products: batch and head stay, positions are mixed.
attention = mixes(lambda _, sizes: range(2, len(sizes)))
# Samples stay; channels and positions are mixed.
convolution = mixes(lambda _, sizes: range(1, len(sizes)), all_inputs=False)
# Rows in another order.
flip = mixes(lambda node, sizes: {signed(d) % len(sizes) for d in saved(node, "dims") or range(len(sizes))})
# Padded dimensions no longer line up.
pad = mixes(lambda node, sizes: [d for d, size in enumerate(sizes) if size != shape(node)[d]])
# Each slice along one dimension gets a norm of its own: all the others are mixed.
renorm = mixes(lambda node, sizes: {*range(len(sizes))} - {saved_dim(node, "dim", len(sizes))})
# Normalized over the last dimensions, or all that a sample has.
layer_norm = mixes(
    lambda node, sizes: range(len(sizes) - len(saved(node, "normalized_shape", (0,))), len(sizes)), all_inputs=False
)
group_norm = mixes(lambda _, sizes: range(1, len(sizes)), all_inputs=False)


def everything(node: Node, _output: int, _layout: Layout) -> Inputs:
    """Each element comes from all elements."""
    return [(edge, mixed(size_of(edge), operation(node))) for edge in edges(node)]


def unless_reduced(rule: Rule) -> Rule:
    """Make the rule of a loss: with a reduction of its own it mixes everything."""
    return lambda *given: (rule if saved(given[0], "reduction") == NONE else everything)(*given)


def pointwise(node: Node, output: int, layout: Layout) -> Inputs:
    """Each element comes from the elements at its place."""
    out, name = shape(node, output), operation(node)
    return [(edge, broadcast(layout, size_of(edge), out, name) if edge[0] else ()) for edge in edges(node)]


fused_loss = unless_reduced(pointwise)
# Multi-class margins: one value a row, from the whole row.
per_sample = unless_reduced(of_one(lambda node, layout, sizes: (*layout[:1], *mixed(sizes[1:], operation(node)))))
# Pick each row's target: samples stay, classes are mixed.
nll = unless_reduced(
    of_one(
        lambda node, layout, sizes: (
            (*layout[:1], *mixed(sizes[1:2], operation(node)), *layout[1:])
            if len(sizes) > 1
            else mixed(sizes, operation(node))
        )
    )
)
# Reshapes: the same elements in the same order.
view = of_one(lambda node, layout, sizes: reshaped(layout, sizes, operation(node)))


@of_one
def unsqueeze(node: Node, layout: Layout, _sizes: Shape) -> Layout:
    """Remove the dimension that was put in."""
    dim = saved_dim(node, "dim", len(layout))
    return layout[:dim] + layout[dim + 1 :]


@of_one
def squeeze(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Put the dimensions of size 1 back that were dropped."""
    dropped = {d for d in saved_dims(node, len(sizes)) if sizes[d] == 1}
    kept = iter(layout)
    return tuple(((1, PICKED),) if d in dropped else next(kept) for d in range(len(sizes)))


@of_one
def transpose(node: Node, layout: Layout, _sizes: Shape) -> Layout:
    """Swap two dimensions back."""
    if operation(node) == "T":
        return layout[::-1]
    a, b = saved_dim(node, "dim0", len(layout)), saved_dim(node, "dim1", len(layout))
    order = list(layout)
    order[a], order[b] = order[b], order[a]
    return tuple(order)


@of_one
def permute(node: Node, layout: Layout, _sizes: Shape) -> Layout:
    """Put permuted dimensions back."""
    order: list[Dim] = [()] * len(layout)
    for place, dim in enumerate(saved(node, "dims")):
        order[signed(dim) % len(layout)] = layout[place]
    return tuple(order)


@of_one
def reduction(node: Node, layout: Layout, sizes: Shape) -> Layout:
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


def spatial(node: Node, _output: int, layout: Layout) -> Inputs:
    """Pooling, padding and interpolation: batch and channel stay, positions are mixed; a grid's, too."""
    name, result = operation(node), list[tuple[Edge, Layout]]()
    for place, edge in enumerate(edges(node)):
        sizes = size_of(edge)
        batched = f"{len(sizes) - 2}D" in name or "D" not in name  # an image alone is (channels, height, width)
        kept = 2 if place == 0 and batched and shape(node)[1:2] == sizes[1:2] else 1
        result.append((edge, (*layout[:kept], *mixed(sizes[kept:], name)) if edge[0] else ()))
    return result


def matmul(node: Node, _output: int, layout: Layout) -> Inputs:
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


BY_CONSTANT = "Solve"


def matrices(node: Node, _output: int, layout: Layout) -> Inputs:
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


@of_one
def diag_embed(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """A dimension put on the diagonal of two, which mix it."""
    dims = saved_dim(node, "dim1", len(layout)), saved_dim(node, "dim2", len(layout))
    return (*(dim for d, dim in enumerate(layout) if d not in dims), *mixed(sizes[-1:], operation(node)))


# A complex tensor as pairs of numbers, put last; and back.
view_as_real = of_one(lambda _node, layout, _sizes: layout[:-1])
view_as_complex = of_one(lambda node, layout, _sizes: (*layout, *mixed((2,), operation(node))))


@of_one
def ctc(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """One value a sequence, from log-probabilities of shape (time, batch, classes)."""
    if len(sizes) != len(("time", "batch", "classes")) or not layout:
        return mixed(sizes, operation(node))
    # Time comes first here, and is known not to hold samples: these lie behind it.
    return ((sizes[0], SHARED),), layout[0], ((sizes[2], operation(node)),)


@of_one
def unfold(node: Node, layout: Layout, sizes: Shape) -> Layout:
    """Windows over one dimension, put last: that dimension is mixed."""
    return mix(layout, sizes, {saved_dim(node, "dimension", len(sizes))}, operation(node))


def batch_norm(node: Node, _output: int, layout: Layout) -> Inputs:
    """Batch statistics mix the samples; running statistics do not."""
    (first, *rest), name = edges(node), operation(node)
    if saved(node, "training"):
        sizes = shape(node)
        # instance_norm is a batch_norm of one batch with all samples' channels side by side
        layout = (((sizes[0], name if sizes[0] > 1 else PICKED),), layout[1], *mixed(sizes[2:], name))
    return [(first, layout), *((edge, mixed(size_of(edge), name)) for edge in rest)]


NORMS: dict[str, Rule] = {
    **dict.fromkeys(("NativeLayerNorm", "FusedRmsNorm"), layer_norm),
    "NativeGroupNorm": group_norm,
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), batch_norm),
}

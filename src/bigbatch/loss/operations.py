"""Which operation follows which rule. One without a rule is one we know nothing about; the reader then refuses."""

from bigbatch.loss.rules import (
    MATMULS,
    Rule,
    along,
    attention,
    batch_norm,
    convolution,
    ctc,
    diag_embed,
    everything,
    flip,
    fused_loss,
    group_norm,
    layer_norm,
    matmul,
    matrices,
    nll,
    pad,
    per_sample,
    permute,
    pointwise,
    reduction,
    renorm,
    spatial,
    squeeze,
    transpose,
    unfold,
    unsqueeze,
    view,
    view_as_complex,
    view_as_real,
)
from bigbatch.loss.selections import (
    as_strided,
    cat,
    copy_slices,
    diagonal,
    index,
    index_put,
    index_select,
    masked_select,
    put_rows,
    select,
    split,
    stack,
    take_slice,
)

NORMS: dict[str, Rule] = {
    "NativeLayerNorm": layer_norm,
    "FusedRmsNorm": layer_norm,
    "NativeGroupNorm": group_norm,
    "NativeBatchNorm": batch_norm,
    "CudnnBatchNorm": batch_norm,
    "MiopenBatchNorm": batch_norm,
}

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

RULES: dict[str, Rule] = {
    **dict.fromkeys(PURE_POINTWISE | MASKED_POINTWISE, pointwise),
    **dict.fromkeys(POINTWISE_LOSSES, fused_loss),
    **dict.fromkeys(ROW_LOSSES, per_sample),
    **dict.fromkeys(NLL, nll),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(SPATIAL, spatial),
    **dict.fromkeys(FOURIER, reduction),
    **dict.fromkeys(MATRICES, matrices),
    **dict.fromkeys(ATTENTION, attention),
    **dict.fromkeys(MATMULS, matmul),
    **NORMS,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "T": transpose,
    "Transpose": transpose,
    "Permute": permute,
    "Slice": take_slice,
    "Split": split,
    "SplitWithSizes": split,
    "UnsafeSplit": split,
    "UnsafeSplitWithSizes": split,
    "Select": select,
    "Unbind": select,
    "Index": index,
    "IndexSelect": index_select,
    "Gather": index_select,
    "MaskedSelect": masked_select,
    "Cat": cat,
    "Stack": stack,
    "Diagonal": diagonal,
    "DiagEmbed": diag_embed,
    "Convolution": convolution,
    "Flip": flip,
    "Roll": flip,
    "ConstantPadNd": pad,
    "Unfold": unfold,
    "Renorm": renorm,
    "AsStrided": as_strided,
    "IndexPut": index_put,
    **dict.fromkeys(("IndexAdd", "IndexCopy", "ScatterAdd"), put_rows),
    "CopySlices": copy_slices,
    "ViewAsReal": view_as_real,
    "ViewAsComplex": view_as_complex,
    "Pdist": everything,
    "Dot": everything,
    "Vdot": everything,
    "CtcLoss": ctc,
    "CudnnCtcLoss": ctc,
}


def rule_of(name: str) -> Rule | None:
    """Return what is known of an operation; the backward of a pointwise operation is pointwise, too."""
    found = RULES.get(name)
    if found is None and name.endswith("Backward") and name.removesuffix("Backward") in PURE_POINTWISE:
        return pointwise
    return found

"""Which operation follows which rule. One without a rule is one we know nothing about; the reader then refuses."""

from collections.abc import Iterable

from bigbatch.loss import puts, rules, selections
from bigbatch.loss.rules import MATMULS, Rule

NORMS: dict[str, Rule] = {
    **dict.fromkeys(("NativeLayerNorm", "FusedRmsNorm"), rules.layer_norm),
    "NativeGroupNorm": rules.group_norm,
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), rules.batch_norm),
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

_BY_RULE: dict[Rule, Iterable[str]] = {
    rules.pointwise: PURE_POINTWISE | MASKED_POINTWISE,
    rules.fused_loss: POINTWISE_LOSSES,
    rules.per_sample: ROW_LOSSES,
    rules.nll: NLL,
    rules.reduction: REDUCTIONS | FOURIER,
    rules.along: ALONG,
    rules.view: VIEWS,
    rules.spatial: SPATIAL,
    rules.matrices: MATRICES,
    rules.attention: ATTENTION,
    rules.matmul: MATMULS,
    rules.everything: {"Pdist", "Dot", "Vdot"},
    rules.unsqueeze: {"Unsqueeze"},
    rules.squeeze: {"Squeeze"},
    rules.transpose: {"T", "Transpose"},
    rules.permute: {"Permute"},
    rules.diag_embed: {"DiagEmbed"},
    rules.convolution: {"Convolution"},
    rules.flip: {"Flip", "Roll"},
    rules.pad: {"ConstantPadNd"},
    rules.unfold: {"Unfold"},
    rules.renorm: {"Renorm"},
    rules.view_as_real: {"ViewAsReal"},
    rules.view_as_complex: {"ViewAsComplex"},
    rules.ctc: {"CtcLoss", "CudnnCtcLoss"},
    selections.take_slice: {"Slice"},
    selections.split: {"Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes"},
    selections.select: {"Select", "Unbind"},
    selections.index: {"Index"},
    selections.index_select: {"IndexSelect", "Gather"},
    selections.masked_select: {"MaskedSelect"},
    puts.cat: {"Cat"},
    puts.stack: {"Stack"},
    selections.diagonal: {"Diagonal"},
    selections.as_strided: {"AsStrided"},
    puts.index_put: {"IndexPut"},
    puts.put_rows: {"IndexAdd", "IndexCopy", "ScatterAdd"},
    puts.copy_slices: {"CopySlices"},
}
RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE.items() for name in names} | NORMS


def rule_of(name: str) -> Rule | None:
    """Return what is known of an operation; the backward of a pointwise operation is pointwise, too."""
    found = RULES.get(name)
    if found is None and name.endswith("Backward") and name.removesuffix("Backward") in PURE_POINTWISE:
        return rules.pointwise
    return found

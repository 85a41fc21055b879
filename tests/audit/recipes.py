# ruff: noqa: ARG005, B008, E501  (a row of a table is a line, and a lambda of a family takes what the others take)
# fmt: off
"""A specification of what the reader knows: of every operation, along every axis, which outcome is right.

A row is one operation on the output of a model, made so that its node appears in the graph. `APART`: it acts on each
sample alone, so it must be accepted, and exact. `MIXED`: it sets samples against each other, so no consumer of its
result may be accepted unless it is exact all the same (`x.flip(0).mean()`). `CLOSED`: each sample is alone, but the
graph cannot tell; it is refused. `UNSEEN`: the batch has a say by values or places that have no gradient, so no graph
shows it; an `Accumulator` may be wrong, a `BigStep` with its check may not.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit.judge import Batch

APART, MIXED, CLOSED, UNSEEN = "apart", "mixed", "closed", "unseen"
FEATURES = 5
Make: TypeAlias = Any  # (output, batch, model) -> tensor; mypy cannot infer a lambda that binds a loop's variable
Put: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # into a base, by an index, rows
Windows: TypeAlias = tuple[tuple[int, ...], ...]
CONST = torch.linspace(0.3, 1.7, 6, dtype=torch.float64)
# What torch calls a function whose node is called so: `NAMED["leakyrelu"]`.
NAMED: dict[str, Any] = {name.replace("_", ""): value for home in (torch, torch.special, F) for name, value in vars(home).items() if callable(value) and name[-1] != "_"}

def named(names: str) -> dict[str, Any]:
    """The functions of torch behind these nodes."""
    return {name: NAMED[name.removeprefix("Special").lower()] for name in names.split()}

class Net(nn.Module):
    """A model with an output of any shape per sample; its tokens go through the last layer one by one, or together."""

    def __init__(self, shape: Sequence[int], *, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shape, self.tokens = tuple(shape), tokens and len(shape) > 1
        width = shape[-1]
        self.layer = nn.Linear(FEATURES, width if self.tokens else math.prod(shape))
        self.p, self.s = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.rand(()) + 0.5)
        self.square, self.table = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(7, width))
        self.kernel = nn.Parameter(torch.randn(shape[0], shape[0], *(2 for _ in shape[1:])))
        self.register_buffer("frozen", torch.randn(width, width))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        out: Tensor = self.layer(x if self.tokens else x[:, 0])
        return out.view(len(x), *self.shape)

def batches(shape: Sequence[int], sizes: Sequence[int], seed: int) -> list[Batch]:
    """Micro-batches of these sizes: inputs, and targets, masks, labels and weights for every sample."""
    by = torch.Generator().manual_seed(seed)

    def one(n: int) -> Batch:
        normal = functools.partial(torch.randn, generator=by, dtype=torch.float64)
        return {
            "x": normal(n, max(math.prod(shape[:-1]), 1), FEATURES), "d": normal(n, *shape), "mask": torch.rand(n, *shape, generator=by) < 0.6,
            "label": torch.randint(shape[0], (n,), generator=by), "last": torch.randint(shape[-1], (n, *shape[:-1]), generator=by),
            "inner": torch.randint(shape[0], (n, *shape[1:]), generator=by), "w": torch.rand(n, generator=by, dtype=torch.float64) + 0.5,
            "row": torch.randint(7, (n,), generator=by),
        }

    return [one(n) for n in sizes]

@dataclass(frozen=True)
class Row:
    """One operation, applied one way, and the outcome that is right for it."""

    name: str  # of the node
    label: str
    make: Make
    outcome: str = APART
    shape: tuple[int, ...] = (3, 4)
    windows: Windows = ((3, 2, 5), (3, 1, 4))
    aligned: bool = True  # its rows lie in the order of the samples
    brief: bool = False  # one of a long family: fewer consumers are tried

    def __str__(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name

def _slope(x: Tensor) -> Tensor:
    value = x.tanh()
    return torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)[0]

def unary() -> Iterator[Row]:
    """One input, element by element: functions of any number, of one between 0 and 1, and those with more to say."""
    table: dict[str, Any] = named(
        "Exp Exp2 Expm1 Neg Abs Sin Cos Atan Sinh Cosh Tanh Asinh Sigmoid LogSigmoid Softplus Relu LeakyRelu Elu Celu Gelu Silu Mish Hardtanh Hardswish "
        "Hardsigmoid Hardshrink Softshrink Erf Erfc Clone Sinc SpecialErfcx SpecialLogNdtr NanToNum Frac"
    )
    inside = named("Log Log2 Log10 Log1P Sqrt Rsqrt Tan Asin Acos Atanh Erfinv Reciprocal Logit Digamma Lgamma SpecialEntr SpecialNdtri")
    table |= {name: lambda x, f=f: f(0.8 * x.sigmoid() + 0.1) for name, f in inside.items()}
    table |= {name: lambda x, f=f: x * f(x) for name, f in named("Sgn Sign Round Floor Ceil Trunc").items()}
    table |= {
        "Threshold": lambda x: F.threshold(x, 0.1, 0.0), "Clamp": lambda x: x.clamp(-0.8, 1.1), "ClampMin": lambda x: x.clamp_min(0.1), "ClampMax": lambda x: x.clamp_max(0.1),
        "Acosh": lambda x: (x.abs() + 1.5).acosh(), "ToCopy": lambda x: x.to(torch.complex128).abs(), "Alias": torch.ops.aten.alias, "Polygamma": lambda x: (x.abs() + 1).polygamma(1),
        "Expand": lambda x: x.unsqueeze(1).expand(len(x), 2, *x.shape[1:]), "Conj": lambda x: torch.complex(x, x.sin()).conj().abs(),
        "NativeDropout": lambda x: torch.native_dropout(x, 0.0, train=True)[0], "Rsub": lambda x: torch.rsub(x, 1.0), "TanhBackward": _slope,
        "RreluWithNoise": lambda x: torch.ops.aten.rrelu_with_noise(x.contiguous(), torch.zeros(x.shape).to(x), 0.2, 0.2, True),
        "Angle": lambda x: torch.complex(x, x.sin() + 0.1).angle(), "ViewAsReal": lambda x: torch.view_as_real(torch.complex(x, x.sin())),
        "ViewAsComplex": lambda x: torch.view_as_complex(torch.stack([x, x.sin()], -1)).abs(),
    }
    for (name, f), place in product(table.items(), range(3)):
        yield Row(name, f"samples {place}", lambda x, b, m, f=f, place=place: f(x.movedim(0, place)), brief=True)

def binary() -> Iterator[Row]:
    """Two or three inputs that broadcast against each other: with what, and is each sample still alone?"""
    table: dict[str, Any] = named("Add Sub Rsub Mul Atan2 Maximum Minimum Fmax Fmin Logaddexp Logaddexp2 Hypot")
    table |= {
        "Div": lambda a, b: a / (b.abs() + 1), "Pow": lambda a, b: (a.abs() + 0.5) ** b.tanh(), "Lerp": lambda a, b: torch.lerp(a, b, 0.3), "Addcmul": lambda a, b: torch.addcmul(a, b, b),
        "Addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1), "Xlogy": lambda a, b: torch.xlogy(a, b.abs() + 0.1), "SpecialXlog1Py": lambda a, b: torch.special.xlog1py(a, b.abs()),
        "Fmod": lambda a, b: a.fmod(b.detach().abs() * 0.3 + 0.1) * a, "Remainder": lambda a, b: a.remainder(b.detach().abs() * 0.3 + 0.1) * a, "Copysign": lambda a, b: torch.copysign(a, b).exp(),
        "Clamp": lambda a, b: a.clamp(min=b), "Where": lambda a, b: torch.where(b.detach() > 0, a, b), "MaskedFill": lambda a, b: a.masked_fill(b.detach() > 0, 0.0),
        "Complex": lambda a, b: torch.complex(a, b).abs(), "Polar": lambda a, b: torch.polar(a.abs(), b).real, "PreluKernel": lambda a, b: NAMED["prelukernel"](*torch.broadcast_tensors(a, b)),
    }
    targets: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        **dict.fromkeys(("MseLoss", "SmoothL1Loss", "HuberLoss"), lambda a, b: (a, b)), "BinaryCrossEntropy": lambda a, b: (a.sigmoid(), b.detach().sigmoid()),
        "BinaryCrossEntropyWithLogits": lambda a, b: (a, b.detach().sigmoid()), "SoftMarginLoss": lambda a, b: (a, b.detach().sign()),
    }
    table |= {name: lambda a, b, f=NAMED[name.lower()], given=given: f(*torch.broadcast_tensors(*given(a, b)), reduction="none") for name, given in targets.items()}
    partners: dict[str, tuple[Callable[[Tensor, Batch, Any], tuple[Tensor, Tensor]], str]] = {
        "own": (lambda x, b, m: (x, x.sin()), APART),
        "data": (lambda x, b, m: (x, b["d"]), APART),
        "data-row": (lambda x, b, m: (x, b["w"][:, None, None]), APART),
        "data-step": (lambda x, b, m: (x, b["d"][:, :, :1]), APART),
        "wider-data": (lambda x, b, m: (x[:, :, :1], b["d"]), APART),
        "wider-data-row": (lambda x, b, m: (x.mean((1, 2), keepdim=True), b["d"]), APART),
        "constant": (lambda x, b, m: (x, CONST[:4]), APART),
        "parameter": (lambda x, b, m: (x, m.p), APART),
        "scalar-parameter": (lambda x, b, m: (x, m.s), APART),
        "own-mean": (lambda x, b, m: (x, x.mean((1, 2), keepdim=True)), APART),
        "own-step": (lambda x, b, m: (x[:, :1], x[:, :, :1]), APART),
        "own-steps-with-steps": (lambda x, b, m: (x[:, :, None], x[:, None]), APART),
        "own-and-wide-data": (lambda x, b, m: (x[:, :, None], b["d"][:, None]), APART),
        "swapped": (lambda x, b, m: (x.transpose(0, 1), b["d"].transpose(0, 1)), APART),
        "in-pairs": (lambda x, b, m: (x[:, None], x[None]), MIXED),
        "in-pairs-of-steps": (lambda x, b, m: (x[:, None, 0], x[:, 1]), MIXED),
        "in-pairs-with-data": (lambda x, b, m: (x[:, None], b["d"][None]), MIXED),
        "in-pairs-with-data-in-front": (lambda x, b, m: (x[None], b["d"][:, None]), MIXED),
        "column-and-row": (lambda x, b, m: (x[:, 0, :1], b["d"][:, 1, 1]), MIXED),
        "row-and-column": (lambda x, b, m: (x[:, 0, 0], b["d"][:, 1, 1:2]), MIXED),
        "expanded-column-and-row": (lambda x, b, m: (x[:, 0, :1].expand(len(x), len(x)), b["d"][:, 1, 1]), MIXED),
        "batch-mean": (lambda x, b, m: (x, x.mean(0)), MIXED),
        "first-sample": (lambda x, b, m: (x, x[:1].sin()), MIXED),
    }
    for (name, f), (label, (pair, outcome)) in product(table.items(), partners.items()):
        fused = "Loss" in name or "Binary" in name or name in {"Where", "MaskedFill", "Fmod", "Remainder"}
        by_parameter = name not in {"MseLoss", "SmoothL1Loss", "HuberLoss", "Where"} if fused else name == "PreluKernel" and "scalar" in label
        if "parameter" in label and by_parameter:  # it takes none
            continue
        without_gradient = name in {"Fmod", "Remainder", "MaskedFill"} or "Binary" in name or "Margin" in name
        due = UNSEEN if without_gradient and label in {"batch-mean", "first-sample"} else outcome
        windows = ((5, 2, 6),) if "wide" in label else ((3, 2, 5), (3, 1, 4))  # as many samples as steps are pairs
        yield Row(name, label, lambda x, b, m, f=f, pair=pair: f(*pair(x, b, m)), due, windows=windows, brief=True)

def _index(x: Tensor, dim: int) -> Tensor:
    """Numbers of positions along a dimension, for each place: they run backwards."""
    order = torch.arange(x.shape[dim]).flip(0)
    return order.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]).expand(x.shape)

def along() -> Iterator[Row]:
    """One dimension is mixed, or one is not."""
    table: dict[str, Any] = named("Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp Glu")
    table |= {name: lambda x, d, f=f: f(x, dim=d)[0] for name, f in named("Cummax Cummin Sort Unbind").items()}
    table |= {
        "Topk": lambda x, d: x.topk(1, d).values, "Gather": lambda x, d: x.gather(d, _index(x, d)), "IndexFill": lambda x, d: x.index_fill(d, torch.tensor([0]), 0.5),
        "IndexAdd": lambda x, d: x.index_add(d, torch.arange(x.shape[d]).flip(0), x.sin()), "ScatterAdd": lambda x, d: x.scatter_add(d, _index(x, d), x.sin()),
        "Scatter": lambda x, d: x.scatter(d, _index(x, d), x.sin()), "ScatterReduce": lambda x, d: x.scatter_reduce(d, _index(x, d), x.sin(), "prod"),
        "IndexCopy": lambda x, d: x.index_copy(d, torch.tensor([0]), x.sin().narrow(d, x.shape[d] - 1, 1)), "ConstantPadNd": lambda x, d: F.pad(x.movedim(d, -1), (1, 0)),
        "Roll": lambda x, d: x.roll(1, d), "Flip": lambda x, d: x.flip(d), "Unfold": lambda x, d: x.unfold(d, 2, 1), "Slice": lambda x, d: x.narrow(d, 1, x.shape[d] - 1), "Select": lambda x, d: x.select(d, 0),
        "Split": lambda x, d: x.split(2, d)[0], "SplitWithSizes": lambda x, d: x.split([1, x.shape[d] - 1], d)[1], "UnsafeSplit": lambda x, d: x.unsafe_split(2, d)[0],
        "UnsafeSplitWithSizes": lambda x, d: x.unsafe_split_with_sizes([1, x.shape[d] - 1], d)[1], "IndexSelect": lambda x, d: x.index_select(d, torch.tensor([0, 1])),
        "Index": lambda x, d: x.movedim(d, 0)[torch.tensor([0, 1])], "Renorm": lambda x, d: torch.renorm(x, 2, d, 0.5), "FftR2C": lambda x, d: torch.fft.rfft(x, dim=d).abs(),
        "FftC2R": lambda x, d: torch.fft.irfft(torch.complex(x, x.sin()), 4, dim=d), "FftC2C": lambda x, d: torch.fft.fft(torch.complex(x, x.sin()), dim=d).abs(),
    }
    for (name, f), place, dim in product(table.items(), range(3), range(3)):
        apart = dim == place if name == "Renorm" else dim != place  # renorm takes each slice of a dimension alone
        mixed = UNSEEN if name in {"Index", "IndexSelect", "Gather"} else MIXED  # rows by number: a mask may have given them
        shape, windows = ((4, 6), ((4, 2, 6), (2, 4, 4))) if name == "Glu" else ((3, 4), ((3, 2, 5), (3, 2, 4)))
        yield Row(name, f"samples {place} dim {dim}", lambda x, b, m, f=f, place=place, dim=dim: f(x.movedim(0, place), dim), APART if apart else mixed, shape, windows)
        if not place and dim and name != "Glu":
            yield Row(name, f"last dim {-dim}", lambda x, b, m, f=f, dim=dim: f(x, -dim), MIXED if name == "Renorm" else APART)

def reductions() -> Iterator[Row]:
    """Some dimensions are reduced, or all; with the dimension kept it is set against its own input, as people do."""
    several: dict[str, Callable[..., Tensor]] = named("Sum Mean Nansum Var Std Logsumexp Amax Amin") | {
        "VarMean": lambda x, d, keepdim: sum(torch.var_mean(x, d, keepdim=keepdim), torch.zeros(())), "StdMean": lambda x, d, keepdim: sum(torch.std_mean(x, d, keepdim=keepdim), torch.zeros(())),
        "LinalgVectorNorm": lambda x, d, keepdim: torch.linalg.vector_norm(x, dim=d, keepdim=keepdim),
        "Norm": lambda x, d, keepdim: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [d] if isinstance(d, int) else d, keepdim),
    }
    single: dict[str, Callable[..., Tensor]] = {name: lambda x, d, keepdim, f=f: f(x, dim=d, keepdim=keepdim).values for name, f in named("Max Min Median Nanmedian Mode").items()} | {
        "Prod": torch.prod, "Kthvalue": lambda x, d, keepdim: x.kthvalue(1, d, keepdim).values, "Aminmax": lambda x, d, keepdim: torch.sub(*torch.aminmax(x, dim=d, keepdim=keepdim)),
    }
    whole: dict[str, Callable[[Tensor], Tensor]] = named("Max Min Median Nanmedian Var Std Amax Nansum Sum Mean") | {
        "Prod": lambda x: (1 + 0.1 * x).prod(), "Norm": lambda x: torch.ops.aten.norm.Scalar(x, 2), "Logsumexp": lambda x: x.logsumexp((0, 1, 2)), "Aminmax": lambda x: torch.sub(*torch.aminmax(x)),
        "LinalgVectorNorm": torch.linalg.vector_norm,
    }
    windows = ((3, 2, 5), (3, 2, 4))  # a deviation of one sample is no number
    cases = [*product(several.items(), range(3), ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))), *product(single.items(), range(3), ((0,), (1,), (2,)))]
    for (name, f), place, dims in cases:
        outcome, label, d = MIXED if place in dims else APART, f"samples {place} dim {''.join(map(str, dims))}", dims if len(dims) > 1 else dims[0]
        yield Row(name, label, lambda x, b, m, f=f, p=place, d=d: f(x.movedim(0, p), d, keepdim=False), outcome, windows=windows)
        yield Row(name, f"{label} kept", lambda x, b, m, f=f, p=place, d=d: (x.movedim(0, p) - f(x.movedim(0, p), d, keepdim=True)).sigmoid(), outcome, windows=windows, brief=True)
    for name, g in whole.items():
        outcome = APART if name in {"Sum", "Mean"} else CLOSED if name == "Nansum" else MIXED  # a nansum keeps no count
        yield Row(name, "of all", lambda x, b, m, g=g: g(x), outcome, windows=windows)
        yield Row(name, "of all against each", lambda x, b, m, g=g: (x - g(x)).sigmoid(), MIXED, windows=windows)
    yield Row("Mean", "of one long row", lambda x, b, m: x.reshape(1, -1).mean(-1), windows=((1, 5, 5), (1, 1, 2)))
    yield Row("Mean", "of a scalar", lambda x, b, m: F.mse_loss(x * m.p, b["d"]).mean())
    yield Row("Sum", "of a scalar", lambda x, b, m: F.cross_entropy(x.flatten(0, 1), b["last"].flatten()).sum())
    yield Row("Sum", "of all over the rows", lambda x, b, m: x.sum() / len(x))
    yield Row("Sum", "of chosen rows over their number", lambda x, b, m: (kept := x[b["w"] > 0.8]).sum() / len(kept), windows=((3, 4, 3), (5, 6, 2)))
    yield Row("Sum", "of all over all", lambda x, b, m: x.sum() / x.numel())

def _softened(f: Any, dim: int) -> Make:
    """What a softmax along a dimension makes of another shape, beside that shape."""
    return lambda x, b, m: (f(x).softmax(dim) + f(x)).sigmoid()

def reshapes() -> Iterator[Row]:
    """The same elements in another shape, then a softmax along one of its dimensions."""
    kinds: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
        "View": lambda x, s: x.contiguous().view(*s), "UnsafeView": lambda x, s: torch.ops.aten._unsafe_view(x.contiguous(), s),
        "ReshapeAlias": lambda x, s: torch.ops.aten._reshape_alias(x.contiguous(), s, torch.empty(tuple(s)).stride()),
    }
    shapes: dict[str, tuple[Callable[[int], Sequence[int]], tuple[str, ...]]] = {
        "n,12": (lambda n: (n, 12), (MIXED, APART)), "3n,4": (lambda n: (3 * n, 4), (MIXED, APART)), "n,2,6": (lambda n: (n, 2, 6), (MIXED, APART, APART)),
        "6n,2": (lambda n: (6 * n, 2), (MIXED, APART)), "12n": (lambda n: (12 * n,), (MIXED,)), "1,12n": (lambda n: (1, 12 * n), (CLOSED, MIXED)), "12n,1": (lambda n: (12 * n, 1), (MIXED, APART)),
        "3,4n": (lambda n: (3, 4 * n), (MIXED, MIXED)), "12,n": (lambda n: (12, n), (MIXED, MIXED)), "n,1,12": (lambda n: (n, 1, 12), (MIXED, APART, APART)),
    }
    for (name, f), (label, (shape, outcomes)) in product(kinds.items(), shapes.items()):
        for dim, outcome in enumerate(outcomes):
            yield Row(name, f"{label} softmax {dim}", _softened(lambda x, f=f, shape=shape: f(x, shape(len(x))), dim), outcome)
    moved: dict[str, tuple[str, Callable[[Tensor], Tensor], tuple[str, ...]]] = {
        "flat": ("T", lambda x: x.flatten(1).t(), (APART, MIXED)),
        "0,1": ("Transpose", lambda x: x.transpose(0, 1), (APART, MIXED, APART)),
        "1,2": ("Transpose", lambda x: x.transpose(1, 2), (MIXED, APART, APART)),
        "0,2": ("Transpose", lambda x: x.transpose(0, 2), (APART, APART, MIXED)),
        "201": ("Permute", lambda x: x.permute(2, 0, 1), (APART, MIXED, APART)),
        "120": ("Permute", lambda x: x.permute(1, 2, 0), (APART, APART, MIXED)),
        "glued": ("Permute", lambda x: x.permute(2, 0, 1).flatten(1), (APART, MIXED)),
        "glued-behind": ("Permute", lambda x: x.permute(1, 0, 2).flatten(1), (APART, MIXED)),
        "0": ("Unsqueeze", lambda x: x.unsqueeze(0), (APART, MIXED, APART, APART)),
        "1": ("Unsqueeze", lambda x: x.unsqueeze(1), (MIXED, APART, APART, APART)),
        "-1": ("Unsqueeze", lambda x: x.unsqueeze(-1), (MIXED, APART, APART, APART)),
        "dim": ("Squeeze", lambda x: x[:, :1].squeeze(1), (MIXED, APART)),
        "all": ("Squeeze", lambda x: x[:, :1].squeeze(), (MIXED, APART)),
        "dims": ("Squeeze", lambda x: x[:, :1, None].squeeze((1, 2)), (MIXED, APART)),
        "none": ("Squeeze", lambda x: x.squeeze(1), (MIXED, APART, APART)),
        "in front": ("Squeeze", lambda x: x.unsqueeze(0).squeeze(0), (MIXED, APART, APART)),
        "stack 0": ("Stack", lambda x: torch.stack([x, x.sin()]), (APART, MIXED, APART, APART)),
        "stack 1": ("Stack", lambda x: torch.stack([x, x.sin()], 1), (MIXED, APART, APART, APART)),
        "stack -1": ("Stack", lambda x: torch.stack([x, x.sin()], -1), (MIXED, APART, APART, APART)),
        "cat 0": ("Cat", lambda x: torch.cat([x, x.sin()]), (MIXED, APART, APART)),
        "cat 1": ("Cat", lambda x: torch.cat([x, x.sin()], 1), (MIXED, APART, APART)),
        "cat 2": ("Cat", lambda x: torch.cat([x, x.sin()], 2), (MIXED, APART, APART)),
        "cat uneven": ("Cat", lambda x: torch.cat([x, x[:, :1].sin()], 1), (MIXED, APART, APART)),
        "cat of rows, viewed": ("Cat", lambda x: torch.cat([x, x.sin()]).view(2, *x.shape), (APART, MIXED, APART, APART)),
        "cat of rows, viewed apart": ("Cat", lambda x: torch.cat([x, x.sin()]).view(len(x), 2, *x.shape[1:]), (MIXED, MIXED, APART, APART)),
    }
    for label, (name, move, outcomes) in moved.items():
        for dim, outcome in enumerate(outcomes):
            windows = ((3, 2, 5), (3, 2 if "all" in label else 1, 4))
            yield Row(name, f"{label} softmax {dim}", _softened(move, dim), outcome, windows=windows, aligned="viewed apart" not in label)

def selections() -> Iterator[Row]:
    """Rows chosen by masks and numbers."""
    rows: list[tuple[str, str, Make, str]] = [
        ("Index", "rows and labels", lambda x, b, m: x[torch.arange(len(x)), b["label"]], APART),
        ("Index", "mask of rows", lambda x, b, m: x[b["w"] > 0.8], APART),
        ("Index", "mask of steps", lambda x, b, m: x[b["mask"][..., 0]], APART),
        ("Index", "mask of all", lambda x, b, m: x[b["mask"]], APART),
        ("Index", "steps", lambda x, b, m: x[:, [0, 2]], APART),
        ("Index", "steps twice", lambda x, b, m: x[:, [0, 2, 2, 1]], APART),
        ("Index", "rows in another order against rows", lambda x, b, m: x[torch.arange(len(x)).flip(0)] * x, MIXED),
        ("Index", "the first row", lambda x, b, m: x[torch.tensor([0])] * x, MIXED),
        ("IndexSelect", "rows against rows", lambda x, b, m: x.index_select(0, torch.arange(len(x)).flip(0)) * x, MIXED),
        ("MaskedSelect", "all", lambda x, b, m: x.masked_select(b["mask"]), APART),
        ("MaskedSelect", "steps", lambda x, b, m: x.masked_select(b["mask"][..., :1]), APART),
        ("MaskedSelect", "softmax", lambda x, b, m: x.masked_select(b["mask"]).softmax(0), MIXED),
        ("Gather", "labels", lambda x, b, m: x.gather(2, b["last"][..., None]).squeeze(2), APART),
        ("Gather", "of rows", lambda x, b, m: x.flatten(1).gather(0, _index(x.flatten(1), 0)) * x.flatten(1), MIXED),
        ("Gather", "whole rows in another order against rows", lambda x, b, m: _gathered(x, torch.arange(len(x)).flip(0)) * x.flatten(1), MIXED),
        ("Gather", "whole rows against others", lambda x, b, m: _gathered(x, torch.arange(len(x))) * _gathered(x, torch.arange(len(x)).roll(1)), MIXED),
        ("Slice", "next step", lambda x, b, m: x[:, 1:] - x[:, :-1], APART),
        ("Slice", "next row", lambda x, b, m: x[1:] - x[:-1], MIXED),
        ("Slice", "the first token against all", lambda x, b, m: (y := x.reshape(-1, 4)) - y[:1], MIXED),
        ("Slice", "every other step", lambda x, b, m: x[:, ::2], APART),
        ("Slice", "halves of two inputs", lambda x, b, m: torch.cat([x, x.sin()])[: len(x)] * torch.cat([x, x.sin()])[len(x) :], APART),
        ("Split", "halves of two inputs", lambda x, b, m: torch.mul(*torch.cat([x, x.sin()]).split(len(x))), APART),
        ("Split", "features", lambda x, b, m: torch.mul(*x.split(2, -1)), APART),
        ("Unbind", "steps", lambda x, b, m: torch.stack([part * (i + 1) for i, part in enumerate(x.unbind(1))], 1), APART),
        ("Unbind", "rows, one by one, rolled against themselves", lambda x, b, m: (y := torch.stack([row.softmax(-1) for row in x.unbind(0)])).flatten(0, 1).roll(1, 0).view_as(y) * y, MIXED),
        ("Slice", "the first row against all, beside a dimension of one", lambda x, b, m: (y := x.reshape(len(x), 1, -1)) * y[:1].sin(), MIXED),
        ("Unbind", "rows, one by one", lambda x, b, m: torch.stack([row.softmax(-1) for row in x.unbind(0)]), APART),
        ("Select", "first step", lambda x, b, m: x[:, 0], APART),
        ("Select", "last step against all", lambda x, b, m: x * x[:, -1, None], APART),
        ("Select", "last row against all", lambda x, b, m: x * x[-1], MIXED),
        ("Diagonal", "of steps", lambda x, b, m: x.diagonal(dim1=1, dim2=2), APART),
        ("Diagonal", "of pairs of steps", lambda x, b, m: torch.bmm(x, x.mT).diagonal(dim1=1, dim2=2), APART),
        ("Diagonal", "of rows and steps", lambda x, b, m: (x[:, None, 0] * x[None, :, 0]).diagonal(), APART),
        ("Diagonal", "of rows and data", lambda x, b, m: (x[:, 0] @ b["d"][:, 0].T).diagonal(), CLOSED),
        ("Diagonal", "of rows and columns", lambda x, b, m: x[:, 0].repeat(1, 3).diagonal(), MIXED),
        ("Gather", "against data of steps", lambda x, b, m: x.gather(2, b["last"][..., None]).squeeze(2) * b["d"][..., 0], APART),
        ("IndexPut", "a feature", lambda x, b, m: _put(x, (torch.arange(len(x)), b["label"])), APART),
        ("IndexPut", "rows", lambda x, b, m: _put(x, (torch.tensor([0]),)), MIXED),
        *((name, label, lambda x, b, m, put=put, how=how: how(put, x.flatten(1), b), outcome) for name, put in INTO.items() for label, (how, outcome) in PUTS.items()),
        ("IndexAdd", "pooled into groups of steps", lambda x, b, m: torch.zeros_like(x).index_add(1, torch.tensor([0, 1, 0]), x), APART),
        ("IndexAdd", "rows into one", lambda x, b, m: torch.zeros_like(x).index_add(0, torch.zeros(len(x), dtype=torch.long), x), MIXED),
        ("ScatterAdd", "counts of classes", lambda x, b, m: torch.zeros_like(x).scatter_add(2, b["last"][..., None].expand_as(x), x), APART),
        ("Scatter", "of targets", lambda x, b, m: x.scatter(2, b["last"][..., None], -1.0), APART),
        ("IndexFill", "a step", lambda x, b, m: x.index_fill(1, torch.tensor([1]), 0.0), APART),
    ]
    yield from (Row(*row) for row in rows)
    yield Row("Index", "rows in another order", lambda x, b, m: x[torch.arange(len(x)).flip(0)], aligned=False)
    yield Row("Gather", "whole rows", lambda x, b, m: _gathered(x, _some(b)), aligned=False)
    yield Row("Gather", "whole rows in another order", lambda x, b, m: _gathered(x, torch.arange(len(x)).flip(0)), aligned=False)
    yield Row("Gather", "whole rows against their targets", lambda x, b, m: _gathered(x, _some(b)) - b["d"].flatten(1)[_some(b)], aligned=False)
    yield Row("Slice", "even and odd rows", lambda x, b, m: x[::2] - x[1::2], windows=((4, 2, 6), (2, 4, 4)))
    yield Row("Slice", "half of the rows", lambda x, b, m: x[: len(x) // 2], UNSEEN, windows=((4, 2, 6), (2, 4, 4)))
    yield Row("Split", "halves of the rows", lambda x, b, m: torch.mul(*x.split(len(x) // 2)), UNSEEN, windows=((4, 2, 6), (2, 4, 4)))

def _gathered(x: Tensor, by: Tensor) -> Tensor:
    rows = x.flatten(1)
    return rows.gather(0, by[:, None].expand(-1, rows.shape[1]))

def _some(b: Batch, chosen: Callable[[Tensor], Tensor] = lambda w: w > 0.8) -> Tensor:
    return chosen(b["w"]).nonzero()[:, 0]


INTO: dict[str, Put] = {
    "IndexAdd": lambda base, by, rows: base.index_add(0, by, rows), "IndexCopy": lambda base, by, rows: base.index_copy(0, by, rows),
    "IndexPut": lambda base, by, rows: base.index_put((by,), rows), "ScatterAdd": lambda base, by, rows: base.scatter_add(0, by[:, None].expand_as(rows), rows),
}

def _put_back(put: Put, x: Tensor, by: Tensor, take: Callable[[Tensor, Tensor], Tensor] = lambda x, by: x[by], base: Tensor | None = None) -> Tensor:
    return put(torch.zeros_like(x) if base is None else base, by, take(x, by).sin())

def _put_both(put: Put, x: Tensor, b: Batch, low: Callable[[Tensor], Tensor], high: Callable[[Tensor], Tensor]) -> Tensor:
    first, second = _some(b, lambda w: w > 1), _some(b, lambda w: w <= 1)
    return put(put(torch.zeros_like(x), first, low(x[first])), second, high(x[second]))

def _put_by_parts(put: Put, x: Tensor) -> Tensor:
    """Two views of one index, which begin at the same place of its memory."""
    every = torch.arange(2 * (len(x) // 2))
    return put(torch.zeros_like(x), every[::2], x[every[: len(every) // 2]].sin())


PUTS: dict[str, tuple[Callable[[Put, Tensor, Batch], Tensor], str]] = {
    "chosen rows, put back by an index of their own": (lambda put, x, b: put(torch.zeros_like(x), _some(b), x[_some(b)].sin()), CLOSED),
    "rows put back by the index that took them": (lambda put, x, b: _put_back(put, x, _some(b)), APART),
    "rows put back, beside rows": (lambda put, x, b: _put_back(put, x, _some(b)) * x, APART),
    "rows put back, beside data": (lambda put, x, b: _put_back(put, x, _some(b)) * b["d"].flatten(1), APART),
    "rows put back, selected": (lambda put, x, b: _put_back(put, x, _some(b), lambda x, by: x.index_select(0, by)) * x, APART),
    "all rows put back": (lambda put, x, b: _put_back(put, x, _some(b, lambda w: w > 0)) * x, APART),
    "two experts": (lambda put, x, b: _put_both(put, x, b, torch.sin, torch.cos) * x, APART),
    "two experts, softened": (lambda put, x, b: _put_both(put, x, b, torch.sin, torch.cos).softmax(0), MIXED),
    "two experts, one of the batch's mean": (lambda put, x, b: _put_both(put, x, b, torch.sin, lambda y: y - y.mean(0)), MIXED),
    "two experts, one of other rows": (lambda put, x, b: _put_both(put, x, b, torch.sin, lambda y: y.flip(0)) * x, MIXED),
    "rows put elsewhere": (lambda put, x, b: put(torch.zeros_like(x), torch.arange(len(x)).flip(0), x.sin()) * x, MIXED),
    "rows put elsewhere than they were taken": (lambda put, x, b: put(torch.zeros_like(x), torch.arange(len(x)).roll(1), x[torch.arange(len(x)).flip(0)]) * x, MIXED),
    "rows put by another part of the index": (lambda put, x, b: _put_by_parts(put, x) * x, MIXED),
    "rows put into others": (lambda put, x, b: _put_back(put, x, torch.tensor([0]), base=x.cos()), MIXED),
    "rows put all into one": (lambda put, x, b: put(torch.zeros_like(x), torch.zeros(len(x), dtype=torch.long), x.sin()) * x, MIXED),
}

def _put(x: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    copy = x.sin()
    copy[at] = x[at] - 0.5
    return copy


DISTANCES = {"Cdist": "donot_use_mm_for_euclid_dist", "EuclideanDist": "use_mm_for_euclid_dist"}

def _cdist(how: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode=how)


SETS: dict[str, tuple[Any, str]] = {  # of (output, batch, model), two sets of points
    "table": (lambda x, b, m: (x[:, 0], m.table), APART), "frozen": (lambda x, b, m: (x[:, 0], m.frozen), APART),
    "steps of one sample": (lambda x, b, m: (x, x.sin()), APART), "data of one sample": (lambda x, b, m: (x, b["d"]), APART),
    "rows with rows": (lambda x, b, m: (x[:, 0], x[:, 1]), MIXED), "rows with data": (lambda x, b, m: (x[:, 0], b["d"][:, 0]), MIXED),
    "rows with rows, step by step": (lambda x, b, m: (x.transpose(0, 1), x.sin().transpose(0, 1)), MIXED),
}

def products() -> Iterator[Row]:
    """Matrix products: with the model's own, with data of the sample, with other samples."""
    rows: list[tuple[str, str, Make, str]] = [
        ("Mm", "parameter", lambda x, b, m: x[:, 0] @ m.square, APART),
        ("Mm", "frozen", lambda x, b, m: x[:, 0] @ m.frozen, APART),
        ("Mm", "computed weight", lambda x, b, m: x[:, 0] @ (m.square * m.p).T, APART),
        ("Mm", "weight from the left", lambda x, b, m: m.square @ x[:, 0].T, APART),
        ("Mm", "rows with rows", lambda x, b, m: x[:, 0] @ x[:, 1].T, MIXED),
        ("Mm", "rows with rows' data", lambda x, b, m: x[:, 0] @ b["d"][:, 0].T, MIXED),
        ("Mm", "covariance", lambda x, b, m: x[:, 0].T @ x[:, 1], MIXED),
        ("Mm", "chosen rows of a table", lambda x, b, m: x[:, 0] @ m.table[b["row"]].T, MIXED),
        ("Addmm", "parameter", lambda x, b, m: torch.addmm(m.p, x[:, 0], m.square), APART),
        ("Addmm", "frozen", lambda x, b, m: torch.addmm(m.p, x[:, 0], m.frozen), APART),
        ("Addmm", "added to itself", lambda x, b, m: torch.addmm(x[:, 1], x[:, 0], m.square), APART),
        ("Addmm", "added to the first", lambda x, b, m: torch.addmm(x[:1, 1], x[:, 0], m.square), MIXED),
        ("Addmm", "rows with rows", lambda x, b, m: torch.addmm(m.s, x[:, 0], x[:, 1].T), MIXED),
        ("Bmm", "steps of one sample", lambda x, b, m: x @ x.mT, APART),
        ("Bmm", "data of one sample", lambda x, b, m: x @ b["d"].mT, APART),
        ("Bmm", "einsum of one sample", lambda x, b, m: torch.einsum("ntc,ntc->n", x, x.sin()), APART),
        ("Bmm", "einsum with data", lambda x, b, m: torch.einsum("nc,nc->n", x[:, 0], b["d"][:, 1]), APART),
        ("Bmm", "einsum of steps with data", lambda x, b, m: torch.einsum("ntc,nsc->nts", x, b["d"]), APART),
        ("Bmm", "einsum of rows with rows' data", lambda x, b, m: torch.einsum("nc,kc->nk", x[:, 0], b["d"][:, 1]), MIXED),
        ("Bmm", "rows with rows' data, step by step", lambda x, b, m: x.transpose(0, 1) @ b["d"].permute(1, 2, 0), MIXED),
        ("Sum", "cosines of rows with rows' data", lambda x, b, m: F.cosine_similarity(x[:, None, 0], b["d"][None, :, 1], dim=-1), MIXED),
        ("Sub", "each row with all data", lambda x, b, m: x[:, 0].repeat_interleave(len(x), 0) - b["d"][:, 0].repeat(len(x), 1), MIXED),
        ("NativeLayerNorm", "expanded, and all data", lambda x, b, m: F.layer_norm(x[:, None].expand(len(x), len(x), 3, 4), (4,)) * b["d"], MIXED),
        ("View", "expanded, reshaped, and all data", lambda x, b, m: x[:, None, 0].expand(len(x), len(x), 4).reshape(-1, 4) * b["d"][:, 0].repeat(len(x), 1), MIXED),
        ("Bmm", "rows with rows, step by step", lambda x, b, m: x.transpose(0, 1) @ x.permute(1, 2, 0), MIXED),
        ("Bmm", "frozen for each step", lambda x, b, m: x.transpose(0, 1) @ m.frozen.expand(3, 4, 4), CLOSED),
        ("Bmm", "parameter for each step", lambda x, b, m: x.transpose(0, 1) @ (m.square * CONST[:3, None, None]), APART),
        ("Baddbmm", "steps of one sample", lambda x, b, m: torch.baddbmm(m.s, x, x.mT), APART),
        ("Baddbmm", "data of one sample", lambda x, b, m: torch.baddbmm(b["d"][:, :, :1], x, b["d"].mT), APART),
        ("Baddbmm", "rows with rows", lambda x, b, m: torch.baddbmm(m.s, x.transpose(0, 1), x.permute(1, 2, 0)), MIXED),
        ("Mv", "parameter", lambda x, b, m: x[:, 0] @ m.p, APART),
        ("Mv", "steps", lambda x, b, m: x @ m.p, APART),
        ("Mv", "weights of samples", lambda x, b, m: x[:, 0].T @ b["w"], MIXED),
        ("Addmv", "parameter", lambda x, b, m: torch.addmv(m.s, x[:, 0], m.p), APART),
        ("Addmv", "added to samples", lambda x, b, m: torch.addmv(x[:, 1, 0], x[:, 0], m.p), APART),
        *((name, label, lambda x, b, m, how=how, pair=pair: _cdist(how, *pair(x, b, m)), outcome) for name, how in DISTANCES.items() for label, (pair, outcome) in SETS.items()),
        ("Dot", "of all", lambda x, b, m: torch.dot(x.flatten(), b["d"].flatten()), APART),
        ("Dot", "of one vector", lambda x, b, m: torch.dot(x[:, 0, 0], x[:, 1, 1]), APART),
        ("Dot", "below a root", lambda x, b, m: torch.dot(x[:, 0, 0], x[:, 0, 0]) * x, MIXED),
        ("Dot", "of shifted vectors", lambda x, b, m: torch.dot(x[:, 0, 0], x[:, 1, 1].flip(0)), MIXED),
        ("Pdist", "rows", lambda x, b, m: F.pdist(x[:, 0]), MIXED),
        ("Tril", "weight", lambda x, b, m: x[:, 0] @ m.square.tril(), APART),
        ("Triu", "weight", lambda x, b, m: x[:, 0] @ m.square.triu(), APART),
        ("LinalgMatrixExp", "weight", lambda x, b, m: x[:, 0] @ torch.linalg.matrix_exp(m.square * 0.1), APART),
        ("WeightNormInterface", "weight", lambda x, b, m: F.linear(x, NAMED["weightnorm"](m.square, m.p[:, None], 0)), APART),
    ]
    yield from (Row(*row, windows=((3, 2, 5), (3, 2 if row[0] == "Pdist" else 1, 4))) for row in rows)

def vectors() -> Iterator[Row]:
    """Products of an output with one vector per sample; an einsum is a batch of one product, or of one per sample."""
    rows: dict[str, tuple[Make, str]] = {
        "nc,kc->nk with data": (lambda x, b, m: torch.einsum("nc,kc->nk", x, b["d"]), MIXED),
        "nc,kc->nk": (lambda x, b, m: torch.einsum("nc,kc->nk", x, x.sin()), MIXED),
        "nc,nk->ck with data": (lambda x, b, m: torch.einsum("nc,nk->ck", x, b["d"]), MIXED),
        "nc,k->nck with weights": (lambda x, b, m: torch.einsum("nc,k->nck", x, b["w"]), MIXED),
        "nc,nc->n with data": (lambda x, b, m: torch.einsum("nc,nc->n", x, b["d"]), APART),
        "nc,nc->n": (lambda x, b, m: torch.einsum("nc,nc->n", x, x.sin()), APART),
        "nc,nk->nck with data": (lambda x, b, m: torch.einsum("nc,nk->nck", x, b["d"]), APART),
        "nc,ck->nk with a parameter": (lambda x, b, m: torch.einsum("nc,ck->nk", x, m.square), APART),
        "nc,kc->nk with a table": (lambda x, b, m: torch.einsum("nc,kc->nk", x, m.table), APART),
    }
    for label, (make, outcome) in rows.items():
        yield Row("Mul" if "nck" in label else "Bmm", f"einsum {label}", make, outcome, (4,), ((3, 2, 5), (6, 2, 4)))
        if "nc,kc->nk" in label and outcome == MIXED:
            yield Row("NllLoss", f"einsum {label}", lambda x, b, m, make=make: F.cross_entropy(make(x, b, m), torch.arange(len(x))), MIXED, (4,))


POOLS = (("AvgPool", ""), ("MaxPool", "WithIndices"), ("AdaptiveAvgPool", ""), ("AdaptiveMaxPool", ""))
MODES = {
    "Nearest": ("nearest", (1, 2, 3)), "NearestExact": ("nearest-exact", (1, 2, 3)), "Linear": ("linear", (1,)), "Bilinear": ("bilinear", (2,)),
    "Bicubic": ("bicubic", (2,)), "Trilinear": ("trilinear", (3,)),
}

def layers() -> Iterator[Row]:
    """Norms, attention, convolutions, pooling: samples stay apart along the first dimension, some also along the second."""
    image, volume, line = (2, 4, 6), (2, 4, 4, 4), (2, 6)
    attention: Any = F.scaled_dot_product_attention
    rows: list[tuple[str, str, Make, str, tuple[int, ...]]] = [
        ("NativeLayerNorm", "", lambda x, b, m: F.layer_norm(x, (4,)), APART, (3, 4)),
        ("NativeLayerNorm", "trained", lambda x, b, m: F.layer_norm(x, (4,), m.p, m.p.sin()), APART, (3, 4)),
        ("NativeLayerNorm", "two dimensions", lambda x, b, m: F.layer_norm(x, (3, 4)), APART, (3, 4)),
        ("NativeLayerNorm", "samples in the middle", lambda x, b, m: F.layer_norm(x.transpose(0, 1), (4,)), APART, (3, 4)),
        ("NativeLayerNorm", "over samples", lambda x, b, m: F.layer_norm(x.movedim(0, 2), (len(x),)), MIXED, (3, 4)),
        ("Rsqrt", "rms norm", lambda x, b, m: F.rms_norm(x, (4,), m.p), APART, (3, 4)),
        ("Rsqrt", "rms norm over samples", lambda x, b, m: F.rms_norm(x.movedim(0, 2), (len(x),)), MIXED, (3, 4)),
        ("NativeGroupNorm", "", lambda x, b, m: F.group_norm(x, 2), APART, image),
        ("NativeGroupNorm", "channels are samples", lambda x, b, m: F.group_norm(x.transpose(0, 1).contiguous(), 1), MIXED, image),
        ("NativeBatchNorm", "asleep", lambda x, b, m: F.batch_norm(x, torch.zeros(2).double(), torch.ones(2).double()), APART, image),
        ("NativeBatchNorm", "awake", lambda x, b, m: F.batch_norm(x, None, None, training=True), MIXED, image),
        ("NativeBatchNorm", "of instances", lambda x, b, m: F.instance_norm(x), APART, image),
        ("NativeBatchNorm", "channels are samples", lambda x, b, m: F.batch_norm(x.transpose(0, 1).contiguous(), None, None, training=True), CLOSED, image),
        ("Convolution", "", lambda x, b, m: F.conv2d(x, m.kernel), APART, image),
        ("Convolution", "transposed", lambda x, b, m: F.conv_transpose2d(x, m.kernel), APART, image),
        ("Convolution", "of a line", lambda x, b, m: F.conv1d(x, m.kernel), APART, line),
        ("Convolution", "constant kernel", lambda x, b, m: F.conv2d(x, torch.ones(1, 2, 2, 2).double()), APART, image),
        ("Convolution", "samples are channels", lambda x, b, m: F.conv1d(x.movedim(0, 1), torch.ones(1, len(x), 2).double()), MIXED, line),
        ("ScaledDotProductFlashAttentionForCpu", "", lambda x, b, m: attention(x, x.sin(), x.cos()), APART, (2, 3, 8)),
        ("ScaledDotProductFlashAttentionForCpu", "heads are samples", lambda x, b, m: attention(*[v.transpose(0, 1) for v in (x, x.sin(), x.cos())]), APART, (2, 3, 8)),
        ("ScaledDotProductFlashAttentionForCpu", "positions are samples", lambda x, b, m: attention(*[v.movedim(0, 2) for v in (x, x.sin(), x.cos())]), MIXED, (2, 3, 8)),
        ("ScaledDotProductFlashAttentionForCpu", "keys of data", lambda x, b, m: attention(x, b["d"], b["d"].sin()), APART, (2, 3, 8)),
        ("MaxPool2DWithIndices", "of a line", lambda x, b, m: F.max_pool1d(x, 2), APART, line), ("AvgPool2D", "of a line", lambda x, b, m: F.avg_pool1d(x, 2), APART, line),
        ("Mean", "adaptive pooling to one", lambda x, b, m: F.adaptive_avg_pool2d(x, 1).flatten(1), APART, image),
        ("ConstantPadNd", "", lambda x, b, m: F.pad(x, (1, 1, 2, 1)), APART, image), ("ConstantPadNd", "rows", lambda x, b, m: F.pad(x, (0, 0, 0, 0, 1, 1)), MIXED, (3, 4)),
        ("AvgPool2D", "rows of an image are samples", lambda x, b, m: F.avg_pool2d(x.transpose(0, 1), 3, 1, 1), MIXED, (3, 4)),
        ("MaxPool2DWithIndices", "rows of an image are samples", lambda x, b, m: F.max_pool2d(x.transpose(0, 1), 3, 1, 1), MIXED, (3, 4)),
        ("AvgPool2D", "rows of one image", lambda x, b, m: F.avg_pool2d(x, 3, 1, 1), APART, (3, 4)),
        ("PixelShuffle", "", lambda x, b, m: F.pixel_shuffle(x, 2), APART, (4, 2, 3)), ("PixelUnshuffle", "", lambda x, b, m: F.pixel_unshuffle(x, 2), APART, image),
        ("Im2Col", "", lambda x, b, m: F.unfold(x, 2), APART, image), ("Col2Im", "", lambda x, b, m: F.fold(x, (3, 3), 2), APART, (8, 4)),
        ("GridSampler2D", "", lambda x, b, m: F.grid_sample(x, b["d"].tanh().movedim(1, 3), align_corners=False), APART, image),
        ("GridSampler2D", "grid of the model", lambda x, b, m: F.grid_sample(b["d"], x.tanh().movedim(1, 3), align_corners=False), APART, image),
    ]
    yield from (Row(*row) for row in rows)
    spatial: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        **{f"{kind}{d}D{more}": (functools.partial(lambda f, x: f(x, 2), NAMED[f"{kind}{d}d".lower()]), d) for kind, more in POOLS for d in (2, 3)},
        **{f"Upsample{kind}{d}D": (functools.partial(F.interpolate, scale_factor=2, mode=mode), d) for kind, (mode, ds) in MODES.items() for d in ds},
        **{f"{kind}Pad{d}D": (functools.partial(lambda d, mode, x: F.pad(x, (1,) * (2 * d), mode=mode), d, mode), d) for kind, mode in (("Reflection", "reflect"), ("Replication", "replicate")) for d in (1, 2, 3)},
        **{f"Upsample{kind.capitalize()}2DAa": (functools.partial(F.interpolate, scale_factor=0.5, mode=kind, antialias=True), 2) for kind in ("bilinear", "bicubic")},
        "FractionalMaxPool2D": (lambda x: F.fractional_max_pool2d(x, 2, output_size=2, _random_samples=torch.full((*x.shape[:2], 2), 0.4).double()), 2),
    }
    for name, (f, d) in spatial.items():
        shape = (line, image, volume)[d - 1]
        yield Row(name, "", lambda x, b, m, f=f: f(x), APART, shape)
        yield Row(name, "channels are samples", lambda x, b, m, f=f: f(x.transpose(0, 1)), APART, shape)
        if "Nearest" not in name:
            yield Row(name, "positions are samples", lambda x, b, m, f=f: f(x.movedim(0, -1)), MIXED, shape, ((5, 3, 7), (3, 5, 4)))

def _full(x: Tensor, size: int, strength: float = 2.0) -> Tensor:
    """Matrices that are far from singular."""
    return 0.2 * x + strength * torch.eye(size, dtype=x.dtype) * torch.arange(1, size + 1)

def matrices() -> Iterator[Row]:
    """What linear algebra makes of each matrix of a batch: samples are the batch, or rows, or columns."""
    linalg: Any = torch.linalg
    table: dict[str, Callable[[Tensor], Tensor]] = {
        "LinalgCholeskyEx": lambda a: linalg.cholesky(a + a.mT), "LinalgInvEx": linalg.inv, "LinalgDet": linalg.det, "LinalgSlogdet": lambda a: linalg.slogdet(a)[1],
        "LinalgSvd": linalg.svdvals, "LinalgEigh": lambda a: linalg.eigh(a + a.mT)[1].square(), "LinalgEig": lambda a: linalg.eig(a)[0].abs(), "LinalgQr": lambda a: linalg.qr(a)[0].square(),
        "LinalgSolveEx": lambda a: linalg.solve(a, a.sin()), "LinalgSolveTriangular": lambda a: linalg.solve_triangular(a, a.sin(), upper=True), "LinalgMatrixExp": lambda a: linalg.matrix_exp(0.2 * a.contiguous()),
        "LinalgLu": lambda a: linalg.lu(a)[2], "LinalgHouseholderProduct": lambda a: linalg.householder_product(a, a[..., 0]),
        "CholeskySolve": lambda a: torch.cholesky_solve(a.sin(), a), "CholeskyInverse": torch.cholesky_inverse,
    }
    for name, f in table.items():
        yield Row(name, "per sample", lambda x, b, m, f=f: f(_full(x, 3)), APART, (3, 3))
        for label, turn in {"rows": lambda a: a, "columns": lambda a: a.mT}.items():
            yield Row(name, f"samples are {label}", lambda x, b, m, f=f, turn=turn: f(turn(_full(x.transpose(0, 1)[..., :1].expand(3, len(x), len(x)), len(x)))), MIXED, (3, 3))
        yield Row(name, "one matrix of all", lambda x, b, m, f=f: f(_full(x.mean(0), 3)), MIXED, (3, 3))
        yield Row(name, "two batch dimensions", lambda x, b, m, f=f: f(_full(x.movedim(0, 1), 3)), APART, (2, 3, 3), brief=True)
    rows: list[tuple[str, str, Make, str]] = [
        ("LinalgSolveEx", "a vector of the sample", lambda x, b, m: linalg.solve(_full(x, 3), x[:, 0]), APART),
        ("LinalgSolveEx", "data of the sample", lambda x, b, m: linalg.solve(_full(x, 3), b["d"]), APART),
        ("LinalgSolveEx", "matrices of data", lambda x, b, m: linalg.solve(_full(b["d"], 3), x), APART),
        ("LinalgSolveEx", "samples are columns of the right side", lambda x, b, m: linalg.solve(_full(b["d"][0], 3), x[:, 0].T), MIXED),
        ("LinalgSolveEx", "one right side of all", lambda x, b, m: linalg.solve(_full(x, 3), x.sin().mean(0)), MIXED),
        ("LinalgSolveEx", "in pairs", lambda x, b, m: linalg.solve(_full(x, 3)[:, None], x[None]), MIXED),
        ("LinalgSolveTriangular", "in pairs", lambda x, b, m: linalg.solve_triangular(_full(x, 3)[:, None], x[None], upper=True), MIXED),
        ("LinalgSolveTriangular", "weight of a flow", lambda x, b, m: linalg.solve_triangular(_full(m.square, 3), x.mT, upper=True), APART),
        ("LinalgSolveTriangular", "samples are columns beside a parameter", lambda x, b, m: linalg.solve_triangular(_full(m.square, 3), x[:, 0].T, upper=True).T, APART),
        ("LinalgSolveTriangular", "samples are columns beside a parameter, a norm of each", lambda x, b, m: linalg.solve_triangular(_full(m.square, 3)[None], x[:, 0].T[None], upper=True).square().sum(-2).T.reshape(-1), APART),
        ("LinalgSolveTriangular", "samples are columns beside the model's own", lambda x, b, m: linalg.solve_triangular(_full(m.frozen, 3), x[:, 0].T, upper=True).T, CLOSED),
        ("LinalgSolveTriangular", "samples are columns beside their covariance", lambda x, b, m: linalg.solve_triangular(_full(x[:, 0].T @ x[:, 0], 3), x[:, 0].T, upper=True).T, MIXED),
        ("LinalgSolveTriangular", "samples are columns, softened", lambda x, b, m: linalg.solve_triangular(_full(m.square, 3), x[:, 0].T, upper=True).softmax(-1), MIXED),
        ("LinalgSolveTriangular", "samples are columns of both", lambda x, b, m: linalg.solve_triangular(_full(m.square, 3), x[:, 0].T, upper=True, left=True).T * x[:, 0].flip(0), MIXED),
        ("LinalgSolveTriangular", "samples are columns on the left side", lambda x, b, m: linalg.solve_triangular(_full(x[:, 0] @ x[:, 0].T, len(x)), x[:, 0].T, upper=True, left=False).T, MIXED),
        ("LinalgSolveTriangular", "distances of a normal with a scale of its own", lambda x, b, m: linalg.solve_triangular(_full(x, 3), x[:, 0].reshape(-1, len(x), 3).permute(1, 2, 0), upper=True).square().sum(-2).t().reshape(-1), APART),
        ("LinalgSolveTriangular", "distances of a normal with a scale of data", lambda x, b, m: linalg.solve_triangular(_full(b["d"], 3), x[:, 0].reshape(-1, len(x), 3).permute(1, 2, 0), upper=True).square().sum(-2).t().reshape(-1), APART),
        ("DiagEmbed", "features", lambda x, b, m: torch.diag_embed(x[:, 0]), APART),
        ("DiagEmbed", "features of steps, beside data", lambda x, b, m: torch.diag_embed(x) * b["d"][..., None], APART),
        ("DiagEmbed", "a parameter", lambda x, b, m: x @ torch.diag(m.p), APART),
        ("DiagEmbed", "samples", lambda x, b, m: torch.diag(x[:, 0, 0]), CLOSED),
        ("DiagEmbed", "samples, beside rows", lambda x, b, m: torch.diag(x[:, 0, 0]) @ x[:, 1], CLOSED),
        ("Diagonal", "copied, of pairs", lambda x, b, m: torch.diag(x[:, 0] @ x[:, 1].T.flip(1)), MIXED),
        ("CholeskySolve", "in pairs", lambda x, b, m: torch.cholesky_solve(x[:, None], _full(x, 3)[None]), MIXED),
        ("LinalgCross", "in pairs with data", lambda x, b, m: linalg.cross(x[:, None], b["d"][None], dim=-1), MIXED),
        ("FftR2C", "of a plane", lambda x, b, m: torch.fft.rfft2(x).abs(), APART),
        ("FftC2C", "of a plane with samples", lambda x, b, m: torch.fft.fft2(torch.complex(x, x.sin()), dim=(0, 1)).abs(), MIXED),
        ("FftC2R", "filter", lambda x, b, m: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(b["d"]), 3), APART),
        ("FftR2C", "spectrogram", lambda x, b, m: torch.stft(x.flatten(1), 4, window=torch.ones(4).double(), return_complex=True).abs(), APART),
        ("FftR2C", "spectrogram of one long signal", lambda x, b, m: torch.stft(x.flatten(), 4, window=torch.ones(4).double(), return_complex=True).abs(), MIXED),
        ("Vdot", "of all", lambda x, b, m: torch.vdot(torch.complex(x, x.sin()).flatten(), torch.complex(b["d"], b["d"].sin()).flatten()).real, APART),
        ("ViewAsComplex", "rotary positions", lambda x, b, m: torch.view_as_real(torch.view_as_complex(torch.stack([x, x.sin()], -1)) * torch.polar(torch.ones(3).double(), CONST[:3])), APART),
        ("ViewAsReal", "set against data", lambda x, b, m: torch.view_as_real(torch.complex(x, x.sin())) * b["d"][..., None], APART),
    ]
    yield from (Row(*row, (3, 3), ((4, 2, 5), (6, 1, 4))) for row in rows)

def _written(base: Tensor, at: Any, value: Any) -> Tensor:
    copy = base.clone()
    copy[at] = value
    return copy

def _kept(x: Tensor, mask: Tensor) -> Tensor:
    return _written(x.sin(), mask, x[mask])

def _filled(x: Tensor, order: Sequence[int]) -> Tensor:
    rows = torch.zeros_like(x)
    for place, row in enumerate(order):
        rows[place] = x[row].sin()
    return rows

def _decoded(x: Tensor, *, first: bool = False) -> Tensor:
    steps = x.new_zeros(len(x), 3, 4) if first else x.new_zeros(3, len(x), 4)
    for step in range(3):
        steps[(slice(None), step) if first else step] = x[:, step] * (step + 1)
    return steps

def _view_written(x: Tensor, at: Any) -> Tensor:
    copy = x.sin()
    view = copy[at]
    view.mul_(2)
    return view

def writes() -> Iterator[Row]:
    """Copies, windows by strides, and parts written over: of samples' own, or of others'."""
    slices, n = slice, len
    rows: list[tuple[str, str, Make, str]] = [
        ("Repeat", "steps", lambda x, b, m: x.repeat(1, 2, 1), APART),
        ("Repeat", "rows", lambda x, b, m: x.repeat(2, 1, 1), APART),
        ("Repeat", "rows beside data in another order", lambda x, b, m: x.repeat(2, 1, 1) * b["d"].repeat_interleave(2, 0), UNSEEN),
        ("Repeat", "all pairs", lambda x, b, m: x.repeat(n(x), 1, 1) * x.repeat_interleave(n(x), 0), MIXED),
        ("Repeat", "a column and a row of data", lambda x, b, m: x[:, 0, :1].repeat(1, n(x)) * b["w"], MIXED),
        ("AsStrided", "windows", lambda x, b, m: x.flatten(1).as_strided((n(x), 5, 4), (12, 2, 1)), APART),
        ("AsStrided", "windows over all", lambda x, b, m: x.flatten().as_strided((3 * n(x) - 1, 8), (4, 1)).prod(1), MIXED),
        ("AsStrided", "beyond the sample", lambda x, b, m: F.pad(x.flatten(), (0, 12)).as_strided((n(x), 16), (12, 1)).prod(1), MIXED),
        ("AsStrided", "samples behind", lambda x, b, m: x.contiguous().as_strided((12, n(x)), (1, 12)), CLOSED),
        ("AsStrided", "the first sample", lambda x, b, m: x * x.contiguous().as_strided(x.shape, (0, 4, 1)), MIXED),
        ("AsStrided", "a view that was written", lambda x, b, m: _view_written(x, (slices(None), 0)), APART),
        ("AsStrided", "a row that was written", lambda x, b, m: _view_written(x, 0), MIXED),
        ("CopySlices", "a step", lambda x, b, m: _written(x.sin(), (slices(None), 0), x[:, 1]), APART),
        ("CopySlices", "a step into data", lambda x, b, m: _written(b["d"], (slices(None), 0), x[:, 1]), APART),
        ("CopySlices", "shifted steps", lambda x, b, m: _written(x.sin(), (slices(None), slices(1, None)), x[:, :-1]), APART),
        ("CopySlices", "a number", lambda x, b, m: _written(x.sin(), (slices(None), 0), 0.5), APART),
        ("CopySlices", "a parameter", lambda x, b, m: _written(x.sin(), (slices(None), 0), m.p), APART),
        ("CopySlices", "a decoder", lambda x, b, m: _decoded(x), APART),
        ("CopySlices", "a decoder beside data", lambda x, b, m: _decoded(x) * b["d"].transpose(0, 1), APART),
        ("CopySlices", "a decoder, over samples", lambda x, b, m: _decoded(x).softmax(1), MIXED),
        ("CopySlices", "a decoder, samples first", lambda x, b, m: _decoded(x, first=True) * b["d"], APART),
        ("CopySlices", "a decoder of shifted samples", lambda x, b, m: _decoded(x.roll(1, 0)) * x.transpose(0, 1), MIXED),
        ("CopySlices", "the diagonal of pairs", lambda x, b, m: (x[:, 0] @ x[:, 1].T).fill_diagonal_(0.0), MIXED),
        ("CopySlices", "a softmax over the batch", lambda x, b, m: _written(x.sin(), (slices(None), 0), x[:, 0].softmax(0)), MIXED),
        ("CopySlices", "of rows, in place", lambda x, b, m: _filled(x, range(n(x))), CLOSED),
        ("CopySlices", "of rows, in another order", lambda x, b, m: _filled(x, range(n(x))[::-1]), MIXED),
        ("CopySlices", "the next row", lambda x, b, m: _written(x.sin(), slices(0, -1), x[1:]), MIXED),
        ("CopySlices", "a parameter into the first", lambda x, b, m: _written(x.sin(), 0, m.p), UNSEEN),
        ("CopySlices", "the first row everywhere", lambda x, b, m: _written(x.sin(), (slices(None), 0), x[:1, 0]), MIXED),
        ("CopySlices", "a number into the first", lambda x, b, m: _written(x.sin(), 0, 0.5), UNSEEN),
        ("CopySlices", "half of the rows", lambda x, b, m: _written(x.sin(), slices(0, n(x) // 2), x[n(x) // 2 : n(x) // 2 * 2]), MIXED),
        ("IndexPut", "rows by a mask, beside data", lambda x, b, m: _kept(x, b["w"] > 0.8) * b["d"], APART),
        ("IndexPut", "elements by a mask, beside data", lambda x, b, m: _kept(x, b["mask"]) * b["d"], APART),
        ("IndexPut", "rows by a mask, of other rows", lambda x, b, m: _written(x.sin(), b["w"] > 0.8, x.roll(1, 0)[b["w"] > 0.8]), MIXED),
        ("IndexPut", "the batch's mean by a mask of one", lambda x, b, m: _written(x.sin(), b["w"] == b["w"].max(), x.mean(0)), MIXED),
        ("IndexPut", "another's row by a mask of one, beside data", lambda x, b, m: _written(b["d"], b["w"] == b["w"].max(), x[b["w"] == b["w"].min()]), MIXED),
        ("IndexPut", "rows in another order", lambda x, b, m: _written(torch.zeros_like(x), torch.arange(n(x)).flip(0), x) * x, MIXED),
        ("IndexPut", "rows into one", lambda x, b, m: torch.zeros_like(x).index_put((torch.zeros(n(x)).long(),), x, accumulate=True), MIXED),
    ]
    for name, label, make, outcome in rows:
        yield Row(name, label, make, outcome, windows=((5, 2, 6), (7, 2, 4)))
        if "decoder" in label:  # the graph of other micro-batches tells where a part was written
            yield Row(name, f"{label}, of as many samples as steps", make, outcome, windows=((5, 3, 6), (3, 4, 3)))
            late = CLOSED if outcome == APART else outcome
            yield Row(name, f"{label}, of as many samples as steps at first", make, late, windows=((3, 5, 3), (3, 4, 3)))


PAIRED = (("MseLoss", ""), ("SmoothL1Loss", ""), ("HuberLoss", ""), ("Abs", "l1_loss"))

def losses() -> Iterator[Row]:
    """Losses with a reduction of their own, and without."""
    for how in ("none", "mean", "sum"):
        rows: list[tuple[str, str, Make, tuple[int, ...]]] = [
            ("NllLoss", "", lambda x, b, m, how=how: F.cross_entropy(x, b["label"], reduction=how), (4,)),
            ("NllLoss", "ignored", lambda x, b, m, how=how: F.cross_entropy(x, b["label"], ignore_index=1, reduction=how), (4,)),
            ("NllLoss", "weights", lambda x, b, m, how=how: F.cross_entropy(x, b["label"], CONST[:4], reduction=how), (4,)),
            ("NllLoss", "smoothed", lambda x, b, m, how=how: F.cross_entropy(x, b["label"], label_smoothing=0.1, reduction=how), (4,)),
            ("NllLoss", "flat", lambda x, b, m, how=how: F.cross_entropy(x.flatten(0, 1), b["last"].flatten(), ignore_index=2, reduction=how), (3, 4)),
            ("NllLoss2D", "", lambda x, b, m, how=how: F.cross_entropy(x.mT, b["last"], ignore_index=2, reduction=how), (3, 4)),
            ("NllLoss2D", "images", lambda x, b, m, how=how: F.cross_entropy(x, b["inner"], CONST[:4], reduction=how), (4, 2, 3)),
            *((name, label, lambda x, b, m, how=how, f=NAMED[(label or name).lower().replace("_", "")]: f(x, b["d"], reduction=how), (3, 4)) for name, label in PAIRED),
            ("MseLoss", "masked", lambda x, b, m, how=how: F.mse_loss(x[b["mask"]], b["d"][b["mask"]], reduction=how), (3, 4)),
            ("BinaryCrossEntropy", "", lambda x, b, m, how=how: F.binary_cross_entropy(x.sigmoid(), b["d"].sigmoid(), reduction=how), (3, 4)),
            ("BinaryCrossEntropyWithLogits", "", lambda x, b, m, how=how: F.binary_cross_entropy_with_logits(x, b["d"].sigmoid(), reduction=how), (3, 4)),
            ("SoftMarginLoss", "", lambda x, b, m, how=how: F.soft_margin_loss(x, b["d"].sign(), reduction=how), (3, 4)),
            ("MultiMarginLoss", "", lambda x, b, m, how=how: F.multi_margin_loss(x, b["label"], reduction=how), (4,)),
            ("MultilabelMarginLoss", "", lambda x, b, m, how=how: F.multilabel_margin_loss(x, F.pad(b["label"][:, None], (0, 3), value=-1), reduction=how), (4,)),
            ("CtcLoss", "", lambda x, b, m, how=how: F.ctc_loss(x.transpose(0, 1).log_softmax(-1), b["last"][:, :2].clamp_min(1), torch.full((len(x),), 6), torch.full((len(x),), 2), reduction=how), (6, 4)),
        ]
        for name, label, make, shape in rows:
            yield Row(name, f"{label} {how}".strip(), make, APART, shape)
    yield Row("NllLoss", "softmax over samples", lambda x, b, m: F.nll_loss(x.log_softmax(0), b["label"]), MIXED, (4,))
    yield Row("MseLoss", "centred", lambda x, b, m: F.mse_loss(x - x.mean(0), b["d"]), MIXED)
    yield Row("Sum", "kl batchmean", lambda x, b, m: F.kl_div(x.log_softmax(-1), b["d"].softmax(-1), reduction="batchmean"))
    yield Row("CtcLoss", "over samples", lambda x, b, m: F.ctc_loss(x.log_softmax(0), b["last"][0, :2].clamp_min(1).expand(6, 2), torch.full((6,), len(x)), torch.full((6,), 1), reduction="none"), MIXED, (6, 4))


LONE = {  # a micro-batch of one sample is a row of its own: what has one row may be read in two ways
    *("Bmm-einsum of one sample", "Bmm-einsum with data", "Bmm-einsum of steps with data"),
    *("NativeBatchNorm-of instances", "LinalgSolveTriangular-distances of a normal with a scale of its own"),
    "LinalgSolveTriangular-distances of a normal with a scale of data",
}

def rows() -> list[Row]:
    """Every row."""
    families = (unary, binary, along, reductions, reshapes, selections, products, vectors, layers, matrices, writes, losses)
    every = [row for family in families for row in family()]
    alone = [replace(row, label=f"{row.label}, one sample", windows=((3, 1, 4),)) for row in every if str(row) in LONE]
    return [replace(row, windows=((3, 2, 5), (6, 2, 4))) if str(row) in LONE else row for row in every] + alone


ELSEWHERE = {
    **dict.fromkeys("CudnnBatchNorm MiopenBatchNorm CudnnCtcLoss FusedDropout FusedRmsNorm".split(), "a GPU makes it"),
    **{f"ScaledDotProduct{kind}Attention": "a GPU makes it" for kind in ("Efficient", "Flash", "Cudnn")},
    "Chunk": "nothing makes it",
    "Linear": "ours, for a GPU: execute.precast",
}

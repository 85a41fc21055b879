# ruff: noqa: E501, PLC3002  (a row of a table is a line)
"""Every loss that must be refused, with the error it must raise and the operation that the error must name.

`UNREADABLE` has no count in its graph, or something nonlinear above its mean, or parameters beside a tensor without
gradient, which may be data or a constant. `COUPLED` ends in an ordinary mean or
cross-entropy, but a sample's part in it depends on the other samples. `SETTLED` are unreadable ones that `counted` settles.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import counted
from bigbatch.errors import CoupledLoss, LossError, UnreadableLoss
from tests.support.losses import (
    Computed,
    Factors,
    Grid,
    squares,
    twice,
    two_heads,
)
from tests.support.samples import (
    CLASSES,
    STEPS,
    Batch,
    Line,
    Loss,
    Tempered,
    conv,
    images,
    mlp,
    rows,
    seeded,
    sequences,
)

EYE = torch.eye(CLASSES, dtype=torch.float64)


@dataclass(frozen=True)
class Refused(Loss):
    """A loss, the error it must raise, and a pattern for the operation that the error must name (case ignored).

    `late`: between micro-batches of one size it makes no difference; beside one of another size it is refused.
    """

    error: type[LossError] = UnreadableLoss
    names: str = ""
    late: bool = False


class Square(torch.autograd.Function):
    """A custom function, acting element by element, which a graph cannot know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x²."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """2 x."""
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


def square(x: Tensor) -> Tensor:
    """Apply the custom function."""
    result: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


@functools.cache
def compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss compiled ahead of time, without the cost of code generation."""
    made: Callable[..., Tensor] = torch.compile(loss, backend="aot_eager")
    return made


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    """What gets compiled."""
    return ((out - target) ** 2).mean()


def masked_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """A masked mean as most people write it."""
    return (squares(model, batch).sum(-1) * batch["mask"]).sum() / batch["mask"].sum()


def orthogonality(model: nn.Module) -> Tensor:
    """How far the first layer's rows are from orthonormal: a regulariser that holds a constant, and no data."""
    weight = next(model.parameters())
    return (weight.mT @ weight - torch.eye(3, dtype=torch.float64)).pow(2).mean()


def line_errors(model: nn.Module, batch: Batch) -> Tensor:
    """Squared errors of the textbook's line: its parameters meet the data itself."""
    return (model(batch["x"]) - batch["x2"]) ** 2


def ranged(batch: Batch) -> Tensor:
    """0, 1, 2, ... one per sample."""
    return torch.arange(len(batch["x"]))


UNREADABLE = [
    Refused("sum-over-number", mlp(), rows, lambda m, b: squares(m, b).sum() / 100, names="div"),
    Refused("time-major-sum-over-steps", mlp(), sequences, lambda m, b: F.mse_loss(m(b["x"]).transpose(0, 1), b["value"].transpose(0, 1), reduction="sum") / STEPS, names="div", smallest=2),
    Refused("sum-over-tensor", mlp(), sequences, masked_by_hand, names="div"),
    Refused("sum-times-tensor", mlp(), rows, lambda m, b: squares(m, b).sum() * torch.tensor(0.01, dtype=torch.float64), names="mul"),
    Refused("sum-over-weights", mlp(), rows, lambda m, b: (squares(m, b).sum(1) * b["unit"][:, 0]).sum() / b["unit"][:, 0].sum(), names="div"),
    Refused("ce-sum-over-kept", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"], reduction="sum") / (b["partly"] != -100).sum(), names="div"),
    Refused("each-over-tensor", mlp(), sequences, lambda m, b: (squares(m, b) * b["mask"][..., None] / b["mask"].sum()).sum(), names="div|sum"),
    Refused("factors-fixed-rows", seeded(Factors), rows, lambda m, _: m.users[[0, 2]].square().sum(), names="data or a regularizer.*sum"),
    Refused("custom-above", mlp(), rows, lambda m, b: square(squares(m, b).mean()), names="Square"),
    Refused("custom-below", mlp(), rows, lambda m, b: square(m(b["x"]) - b["value"]).mean(), names="Square"),
    Refused("custom-beside-parameter", seeded(Tempered), rows, lambda m, b: (m.s * square(m(b["x"]))).mean(), names="Square"),
    Refused("compiled-loss", mlp(), rows, lambda m, b: compiled(mean_square)(m(b["x"]), b["value"]), names="compile"),
    Refused("root-of-mean", mlp(), rows, lambda m, b: squares(m, b).mean().sqrt(), names="sqrt"),
    Refused("norm-of-terms", mlp(), rows, lambda m, b: torch.stack(two_heads(m, b)).norm(), names="norm"),
    Refused("line-sum", seeded(Line), rows, lambda m, b: line_errors(m, b).sum(), names="data or a regularizer.*sum"),
    Refused("sum+orthogonality", mlp(), rows, lambda m, b: squares(m, b).sum() + orthogonality(m), names="data or a regularizer.*mean"),
    Refused("stack-of-one", mlp(), rows, lambda m, b: torch.stack([squares(m, b).mean()]).mean(), names="which of two means", late=True),
    Refused("mean+orthogonality", mlp(), rows, lambda m, b: squares(m, b).mean() + orthogonality(m), names="data or a regularizer.*mean", late=True),
    Refused("ignored+orthogonality", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]) + orthogonality(m), names="data or a regularizer.*mean", late=True),
]  # fmt: skip


# Coupled losses, as their papers and repositories write them.


def normalized(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two views of each sample on the unit sphere."""
    a, b = twice(model, batch)
    return F.normalize(a, dim=1), F.normalize(b, dim=1)


def clip(model: Any, batch: Batch) -> Tensor:
    """CLIP: both directions, a learned temperature."""
    a, b = normalized(model, batch)
    logits = model.s.exp() * a @ b.t()
    return (F.cross_entropy(logits, ranged(batch)) + F.cross_entropy(logits.t(), ranged(batch))) / 2


def simclr_filled(model: nn.Module, batch: Batch) -> Tensor:
    """SimCLR whose diagonal is written over."""
    z = torch.cat(normalized(model, batch))
    n, similar = len(batch["x"]), z @ z.t() / 0.5
    similar.fill_diagonal_(-1e9)
    return F.cross_entropy(similar, (torch.arange(2 * n) + n) % (2 * n))


def dice(model: nn.Module, batch: Batch, dims: tuple[int, ...]) -> Tensor:
    """Soft Dice whose sums run over samples."""
    p = model(batch["x"]).sigmoid()
    y = batch["binary"]
    return (1 - (2 * (p * y).sum(dims) + 1) / (p.sum(dims) + y.sum(dims) + 1)).mean()


def standardized(x: Tensor) -> Tensor:
    """Each feature with mean 0 and deviation 1 over the batch; one sample has none."""
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()


def barlow_twins(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-correlation of two views, kept near the identity."""
    a, b = twice(model, batch)
    correlation = standardized(a).t() @ standardized(b) / len(a)
    return (correlation - EYE).pow(2).mean()


def load_balancing(model: nn.Module, batch: Batch) -> Tensor:
    """Switch Transformer's auxiliary loss: share of samples times mean probability, per expert; the gate is noisy."""
    probs = (model(batch["x"]) + batch["value"]).softmax(1)
    share = F.one_hot(probs.argmax(1), CLASSES).double().mean(0)
    return CLASSES * (share * probs.mean(0)).sum()


def shuffled(batch: Batch) -> Tensor:
    """Other samples in the place of each."""
    return ranged(batch).roll(1)


def mispaired(batch: Batch) -> Tensor:
    """Rows of two views, the second in another order."""
    return torch.cat([ranged(batch), len(batch["x"]) + shuffled(batch)])


def misaligned(model: nn.Module, batch: Batch) -> Tensor:
    """Three calls, cut into halves that pair rows of one with those of another."""
    first, second, third = model(batch["x"][:1]), model(batch["x2"]), model(batch["x3"])[: len(batch["x"])]
    a, b = torch.cat([first, second, third, first.detach()[:1] * first]).chunk(2)
    return (a * b).tanh().mean()


def rewards(model: nn.Module, batch: Batch) -> Tensor:
    """Two calls, put together and seen as two rows."""
    return torch.cat(twice(model, batch)).view(2, -1)


def computed(model: Any, batch: Batch, weight: Tensor) -> Tensor:
    """A cross-entropy over what a computed weight makes of the body's output."""
    return F.cross_entropy(model.body(batch["x"]).tanh() @ weight, batch["label"] % weight.shape[1])


COUPLED = [
    Refused("clip", seeded(Tempered), rows, clip, error=CoupledLoss, names="mm|matmul"),
    Refused("info-nce-einsum", mlp(), rows, lambda m, b: F.cross_entropy(torch.einsum("nd,md->nm", *twice(m, b)), ranged(b)), error=CoupledLoss, names="mm|matmul"),
    Refused("dice-of-the-batch", conv(2), images(4, 4), lambda m, b: dice(m, b, (0, 1, 2, 3)), error=LossError, names="sum|div"),
    Refused("barlow-twins", mlp(), rows, barlow_twins, error=CoupledLoss, names="mm|matmul|var|mean"),
    Refused("centred", mlp(), rows, lambda m, b: (m(b["x"]) - m(b["x"]).mean(0)).pow(2).mean(), error=CoupledLoss, names="mean"),
    Refused("standardized", mlp(), rows, lambda m, b: (standardized(m(b["x"])) - b["value"]).pow(2).mean(), error=CoupledLoss, names="mean|var"),
    Refused("all-differences", mlp(), rows, lambda m, b: (m(b["x"])[:, None] - m(b["x"])[None]).abs().mean(), error=CoupledLoss, names="sub|unsqueeze|expand"),
    Refused("mse-of-columns-against-rows", mlp(1), rows, lambda m, b: F.mse_loss(m(b["x"]), b["scalar"], reduction="none").mean(), error=LossError, names="mse"),
    Refused("all-against-the-first", mlp(), rows, lambda m, b: (m(b["x"]) - m(b["x"])[:1].sin()).square().mean(), error=CoupledLoss, names="sub"),
    Refused("steps-against-detached-samples", seeded(Grid), rows, lambda m, b: (m(b["x"]).transpose(0, 1) @ m(b["x"]).detach().permute(1, 2, 0)).tanh().mean(), error=LossError, names="bmm"),
    Refused("simclr-filled-diagonal", mlp(), rows, simclr_filled, error=CoupledLoss, names="mm"),
    Refused("factors-against-all", seeded(Factors), rows, lambda m, b: (m.users[b["label"]] @ m.things[b["many"][:, 0]].t()).tanh().mean(), error=CoupledLoss, names="mm|matmul"),
    Refused("cdist", mlp(), rows, lambda m, b: torch.cdist(*twice(m, b)).mean(), error=CoupledLoss, names="cdist"),
    Refused("load-balancing", mlp(), rows, load_balancing, error=LossError, names="mean|mul|sum"),
    Refused("softmax-of-reshaped", mlp(), rows, lambda m, b: m(b["x"]).view(1, -1).log_softmax(-1).pow(2).mean(), error=CoupledLoss, names="softmax"),
    Refused("cox", mlp(1), rows, lambda m, b: (m(b["x"])[:, 0] - m(b["x"])[:, 0].logcumsumexp(0)).mean(), error=CoupledLoss, names="cumsumexp"),
    Refused("reshaped-across-samples", mlp(3), rows, lambda m, b: torch.cat(twice(m, b)).view(-1, 2).prod(1).mean(), error=CoupledLoss, names="prod|view"),
    Refused("calls-chunked-and-shuffled", mlp(1), rows, lambda m, b: (lambda r: (r[0] * r[1][shuffled(b)]).tanh().mean())(torch.cat(twice(m, b)).chunk(2)), error=CoupledLoss, names="index|cat"),
    Refused("calls-viewed-and-centred", mlp(1), rows, lambda m, b: (lambda r: (r[0] - r.mean(1)[0]).pow(2).mean())(rewards(m, b)), error=CoupledLoss, names="mean"),
    Refused("calls-interleaved", mlp(1), rows, lambda m, b: (lambda r: (r[::2] * r[1::2]).tanh().mean())(torch.cat(twice(m, b))), error=CoupledLoss, names="cat|slice"),
    Refused("calls-misaligned", mlp(1), rows, misaligned, error=CoupledLoss, names="cat|slice|split"),
    Refused("calls-as-neighbours-against-a-third", mlp(1), rows, lambda m, b: (torch.cat(twice(m, b)).view(-1, 2) * m(b["x3"])).tanh().mean(), error=CoupledLoss, names="cat|expand|mul"),
    Refused("shuffled-and-paired", mlp(1), rows, lambda m, b: (lambda r: (r[0] * r[1]).tanh().mean())(m(torch.cat([b["x"], b["x2"]]))[mispaired(b)].chunk(2)), error=CoupledLoss, names="index"),
    Refused("computed-product-with-batch-values", seeded(lambda: Computed(torch.tanh)), rows, lambda m, b: computed(m, b, (b["value"].t() @ b["value"] @ m.w).t()), error=LossError, names="mm|matmul"),
]  # fmt: skip

# With one sample per micro-batch these are, node for node, losses that keep samples apart: `x.view(1, -1)` is
# `x.flatten(1)`, two rows less each other are a pair, and `einsum` squeezes a dimension of one away.
INVISIBLE_ALONE = {
    "softmax-of-reshaped",
    "info-nce-einsum",
    "calls-chunked-and-shuffled",
    "calls-viewed-and-centred",
    "calls-interleaved",
    "shuffled-and-paired",
    "steps-against-detached-samples",
    "all-against-the-first",
    "mse-of-columns-against-rows",
}


# What the error's advice turns unreadable losses into.

SETTLED = [
    Loss("sum-over-tensor", mlp(), sequences, lambda m, b: counted(masked_by_hand(m, b), b["mask"].sum()), count=lambda b: int(b["mask"].sum())),
    Loss("sum-over-length", mlp(), rows, lambda m, b: counted(squares(m, b).sum() / len(b["x"]), len(b["x"])), count=lambda b: len(b["x"])),
    Loss("scaled-sum", mlp(), rows, lambda m, b: counted(0.01 * squares(m, b).sum(), "sum")),
    Loss("line-sum", seeded(Line), rows, lambda m, b: counted(line_errors(m, b).sum(), "sum")),
    Loss("sum+orthogonality", mlp(), rows, lambda m, b: squares(m, b).sum() + counted(orthogonality(m), "once")),
    Loss("mean+orthogonality", mlp(), rows, lambda m, b: squares(m, b).mean() + counted(orthogonality(m), "once"), count=lambda b: b["value"].numel()),
    Loss("ignored+orthogonality", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]) + counted(orthogonality(m), "once"), count=lambda b: int((b["partly"] != -100).sum())),
    Loss("custom", mlp(), rows, lambda m, b: counted(square(m(b["x"]) - b["value"]).mean(), len(b["x"])), count=lambda b: len(b["x"])),
    Loss("compiled", mlp(), rows, lambda m, b: counted(compiled(mean_square)(m(b["x"]), b["value"]), len(b["x"])), count=lambda b: len(b["x"])),
]  # fmt: skip

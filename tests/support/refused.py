# ruff: noqa: D102, E501, PLC3002  (a row of a table is a line)
# fmt: off
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
from tests.support.losses import Computed, Factors, Grid, squares, twice, two_heads
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
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


square: Callable[[Tensor], Tensor] = Square.apply

@functools.cache
def _compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    made: Callable[..., Tensor] = torch.compile(loss, backend="aot_eager")
    return made

def _mean_square(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).mean()

def _masked_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    return (squares(model, batch).sum(-1) * batch["mask"]).sum() / batch["mask"].sum()

def _orthogonality(model: nn.Module) -> Tensor:
    weight = next(model.parameters())
    return (weight.mT @ weight - torch.eye(3, dtype=torch.float64)).pow(2).mean()

def _line_errors(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["x2"]) ** 2

def _ranged(batch: Batch) -> Tensor:
    return torch.arange(len(batch["x"]))


UNREADABLE = [
    Refused("sum-over-number", mlp(), rows, lambda m, b: squares(m, b).sum() / 100, names="div"),
    Refused("time-major-sum-over-steps", mlp(), sequences, lambda m, b: F.mse_loss(m(b["x"]).transpose(0, 1), b["value"].transpose(0, 1), reduction="sum") / STEPS, names="div", smallest=2),
    Refused("sum-over-tensor", mlp(), sequences, _masked_by_hand, names="div"),
    Refused("sum-times-tensor", mlp(), rows, lambda m, b: squares(m, b).sum() * torch.tensor(0.01, dtype=torch.float64), names="mul"),
    Refused("sum-over-weights", mlp(), rows, lambda m, b: (squares(m, b).sum(1) * b["unit"][:, 0]).sum() / b["unit"][:, 0].sum(), names="div"),
    Refused("ce-sum-over-kept", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"], reduction="sum") / (b["partly"] != -100).sum(), names="div"),
    Refused("each-over-tensor", mlp(), sequences, lambda m, b: (squares(m, b) * b["mask"][..., None] / b["mask"].sum()).sum(), names="div|sum"),
    Refused("factors-fixed-rows", seeded(Factors), rows, lambda m, _: m.users[[0, 2]].square().sum(), names="data or a regularizer.*sum"),
    Refused("custom-above", mlp(), rows, lambda m, b: square(squares(m, b).mean()), names="Square"),
    Refused("custom-below", mlp(), rows, lambda m, b: square(m(b["x"]) - b["value"]).mean(), names="Square"),
    Refused("custom-beside-parameter", seeded(Tempered), rows, lambda m, b: (m.s * square(m(b["x"]))).mean(), names="Square"),
    Refused("compiled-loss", mlp(), rows, lambda m, b: _compiled(_mean_square)(m(b["x"]), b["value"]), names="compile"),
    Refused("root-of-mean", mlp(), rows, lambda m, b: squares(m, b).mean().sqrt(), names="sqrt"),
    Refused("norm-of-terms", mlp(), rows, lambda m, b: torch.stack(two_heads(m, b)).norm(), names="norm"),
    Refused("line-sum", seeded(Line), rows, lambda m, b: _line_errors(m, b).sum(), names="data or a regularizer.*sum"),
    Refused("sum+orthogonality", mlp(), rows, lambda m, b: squares(m, b).sum() + _orthogonality(m), names="data or a regularizer.*mean"),
    Refused("stack-of-one", mlp(), rows, lambda m, b: torch.stack([squares(m, b).mean()]).mean(), names="which of two means", late=True),
    Refused("mean+orthogonality", mlp(), rows, lambda m, b: squares(m, b).mean() + _orthogonality(m), names="data or a regularizer.*mean", late=True),
    Refused("ignored+orthogonality", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]) + _orthogonality(m), names="data or a regularizer.*mean", late=True),
]


# Coupled losses, as their papers and repositories write them.

def _normalized(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    a, b = twice(model, batch)
    return F.normalize(a, dim=1), F.normalize(b, dim=1)

def _clip(model: Any, batch: Batch) -> Tensor:
    a, b = _normalized(model, batch)
    logits = model.s.exp() * a @ b.t()
    return (F.cross_entropy(logits, _ranged(batch)) + F.cross_entropy(logits.t(), _ranged(batch))) / 2

def _simclr_filled(model: nn.Module, batch: Batch) -> Tensor:
    z = torch.cat(_normalized(model, batch))
    n, similar = len(batch["x"]), z @ z.t() / 0.5
    similar.fill_diagonal_(-1e9)
    return F.cross_entropy(similar, (torch.arange(2 * n) + n) % (2 * n))

def _dice(model: nn.Module, batch: Batch, dims: tuple[int, ...]) -> Tensor:
    p = model(batch["x"]).sigmoid()
    y = batch["binary"]
    return (1 - (2 * (p * y).sum(dims) + 1) / (p.sum(dims) + y.sum(dims) + 1)).mean()

def _standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()

def _barlow_twins(model: nn.Module, batch: Batch) -> Tensor:
    a, b = twice(model, batch)
    correlation = _standardized(a).t() @ _standardized(b) / len(a)
    return (correlation - EYE).pow(2).mean()

def _load_balancing(model: nn.Module, batch: Batch) -> Tensor:
    probs = (model(batch["x"]) + batch["value"]).softmax(1)
    share = F.one_hot(probs.argmax(1), CLASSES).double().mean(0)
    return CLASSES * (share * probs.mean(0)).sum()

def _mispaired(batch: Batch) -> Tensor:
    return torch.cat([_ranged(batch), len(batch["x"]) + _ranged(batch).roll(1)])

def _misaligned(model: nn.Module, batch: Batch) -> Tensor:
    first, second, third = model(batch["x"][:1]), model(batch["x2"]), model(batch["x3"])[: len(batch["x"])]
    a, b = torch.cat([first, second, third, first.detach()[:1] * first]).chunk(2)
    return (a * b).tanh().mean()

def _rewards(model: nn.Module, batch: Batch) -> Tensor:
    return torch.cat(twice(model, batch)).view(2, -1)

def _computed(model: Any, batch: Batch, weight: Tensor) -> Tensor:
    return F.cross_entropy(model.body(batch["x"]).tanh() @ weight, batch["label"] % weight.shape[1])


COUPLED = [
    Refused("clip", seeded(Tempered), rows, _clip, error=CoupledLoss, names="mm|matmul"),
    Refused("info-nce-einsum", mlp(), rows, lambda m, b: F.cross_entropy(torch.einsum("nd,md->nm", *twice(m, b)), _ranged(b)), error=CoupledLoss, names="mm|matmul"),
    Refused("dice-of-the-batch", conv(2), images(4, 4), lambda m, b: _dice(m, b, (0, 1, 2, 3)), error=LossError, names="sum|div"),
    Refused("barlow-twins", mlp(), rows, _barlow_twins, error=CoupledLoss, names="mm|matmul|var|mean"),
    Refused("centred", mlp(), rows, lambda m, b: (m(b["x"]) - m(b["x"]).mean(0)).pow(2).mean(), error=CoupledLoss, names="mean"),
    Refused("standardized", mlp(), rows, lambda m, b: (_standardized(m(b["x"])) - b["value"]).pow(2).mean(), error=CoupledLoss, names="mean|var"),
    Refused("all-differences", mlp(), rows, lambda m, b: (m(b["x"])[:, None] - m(b["x"])[None]).abs().mean(), error=CoupledLoss, names="sub|unsqueeze|expand"),
    Refused("mse-of-columns-against-rows", mlp(1), rows, lambda m, b: F.mse_loss(m(b["x"]), b["scalar"], reduction="none").mean(), error=LossError, names="mse"),
    Refused("all-against-the-first", mlp(), rows, lambda m, b: (m(b["x"]) - m(b["x"])[:1].sin()).square().mean(), error=CoupledLoss, names="sub"),
    Refused("steps-against-detached-samples", seeded(Grid), rows, lambda m, b: (m(b["x"]).transpose(0, 1) @ m(b["x"]).detach().permute(1, 2, 0)).tanh().mean(), error=LossError, names="bmm"),
    Refused("simclr-filled-diagonal", mlp(), rows, _simclr_filled, error=CoupledLoss, names="mm"),
    Refused("factors-against-all", seeded(Factors), rows, lambda m, b: (m.users[b["label"]] @ m.things[b["many"][:, 0]].t()).tanh().mean(), error=CoupledLoss, names="mm|matmul"),
    Refused("cdist", mlp(), rows, lambda m, b: torch.cdist(*twice(m, b)).mean(), error=CoupledLoss, names="cdist"),
    Refused("load-balancing", mlp(), rows, _load_balancing, error=LossError, names="mean|mul|sum"),
    Refused("softmax-of-reshaped", mlp(), rows, lambda m, b: m(b["x"]).view(1, -1).log_softmax(-1).pow(2).mean(), error=CoupledLoss, names="softmax"),
    Refused("cox", mlp(1), rows, lambda m, b: (m(b["x"])[:, 0] - m(b["x"])[:, 0].logcumsumexp(0)).mean(), error=CoupledLoss, names="cumsumexp"),
    Refused("reshaped-across-samples", mlp(3), rows, lambda m, b: torch.cat(twice(m, b)).view(-1, 2).prod(1).mean(), error=CoupledLoss, names="prod|view"),
    Refused("calls-chunked-and-shuffled", mlp(1), rows, lambda m, b: (lambda r: (r[0] * r[1][_ranged(b).roll(1)]).tanh().mean())(torch.cat(twice(m, b)).chunk(2)), error=CoupledLoss, names="index|cat"),
    Refused("calls-viewed-and-centred", mlp(1), rows, lambda m, b: (lambda r: (r[0] - r.mean(1)[0]).pow(2).mean())(_rewards(m, b)), error=CoupledLoss, names="mean"),
    Refused("calls-interleaved", mlp(1), rows, lambda m, b: (lambda r: (r[::2] * r[1::2]).tanh().mean())(torch.cat(twice(m, b))), error=CoupledLoss, names="cat|slice"),
    Refused("calls-misaligned", mlp(1), rows, _misaligned, error=CoupledLoss, names="cat|slice|split"),
    Refused("calls-as-neighbours-against-a-third", mlp(1), rows, lambda m, b: (torch.cat(twice(m, b)).view(-1, 2) * m(b["x3"])).tanh().mean(), error=CoupledLoss, names="cat|expand|mul"),
    Refused("shuffled-and-paired", mlp(1), rows, lambda m, b: (lambda r: (r[0] * r[1]).tanh().mean())(m(torch.cat([b["x"], b["x2"]]))[_mispaired(b)].chunk(2)), error=CoupledLoss, names="index"),
    Refused("computed-product-with-batch-values", seeded(lambda: Computed(torch.tanh)), rows, lambda m, b: _computed(m, b, (b["value"].t() @ b["value"] @ m.w).t()), error=LossError, names="mm|matmul"),
]

# With one sample per micro-batch these are, node for node, losses that keep samples apart: `x.view(1, -1)` is
# `x.flatten(1)`, two rows less each other are a pair, and `einsum` squeezes a dimension of one away.
INVISIBLE_ALONE = {"softmax-of-reshaped", "info-nce-einsum", "calls-chunked-and-shuffled", "calls-viewed-and-centred", "calls-interleaved", "shuffled-and-paired", "steps-against-detached-samples", "all-against-the-first", "mse-of-columns-against-rows"}


# What the error's advice turns unreadable losses into.

SETTLED = [
    Loss("sum-over-tensor", mlp(), sequences, lambda m, b: counted(_masked_by_hand(m, b), b["mask"].sum()), count=lambda b: int(b["mask"].sum())),
    Loss("sum-over-length", mlp(), rows, lambda m, b: counted(squares(m, b).sum() / len(b["x"]), len(b["x"])), count=lambda b: len(b["x"])),
    Loss("scaled-sum", mlp(), rows, lambda m, b: counted(0.01 * squares(m, b).sum(), "sum")),
    Loss("line-sum", seeded(Line), rows, lambda m, b: counted(_line_errors(m, b).sum(), "sum")),
    Loss("sum+orthogonality", mlp(), rows, lambda m, b: squares(m, b).sum() + counted(_orthogonality(m), "once")),
    Loss("mean+orthogonality", mlp(), rows, lambda m, b: squares(m, b).mean() + counted(_orthogonality(m), "once"), count=lambda b: b["value"].numel()),
    Loss("ignored+orthogonality", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]) + counted(_orthogonality(m), "once"), count=lambda b: int((b["partly"] != -100).sum())),
    Loss("custom", mlp(), rows, lambda m, b: counted(square(m(b["x"]) - b["value"]).mean(), len(b["x"])), count=lambda b: len(b["x"])),
    Loss("compiled", mlp(), rows, lambda m, b: counted(_compiled(_mean_square)(m(b["x"]), b["value"]), len(b["x"])), count=lambda b: len(b["x"])),
]

# ruff: noqa: E501  (a row of a table is a line)
"""Hypothesis strategies for everything that exactness ranges over: losses, splits, windows, optimizers, clipping.

New losses join the tables of `tests.losses`, new optimizers the table here, and every property test meets them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.losses import AMBIGUOUS_WHEN_EVEN, EITHER, READABLE, SEVERAL
from tests.reference import OptimizerFactory
from tests.samples import Batch, Loss, mlp, sequences

# Batches.

seeds = st.integers(0, 999)


def splits(*, single: bool = False, smallest: int = 1, longest: int = 7) -> st.SearchStrategy[list[int]]:
    """Sizes of the micro-batches of one epoch."""
    return st.lists(st.just(1) if single else st.integers(smallest, 5), min_size=1, max_size=longest)


steps = st.integers(1, 5)


@dataclass(frozen=True)
class Epoch:
    """A loss, its micro-batches, and how many of them make an update."""

    case: Loss
    sizes: list[int]
    seed: int
    steps: int

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches."""
        return self.case.micro_batches(self.sizes, self.seed)


@st.composite
def epochs(draw: st.DrawFn, cases: st.SearchStrategy[Loss]) -> Epoch:
    """An epoch of any of these losses, in any split."""
    case = draw(cases)
    return Epoch(case, draw(splits(single=case.single, smallest=case.smallest)), draw(seeds), draw(steps))


# Losses.

readable = st.sampled_from(READABLE)
either = st.sampled_from([case for case in EITHER if case.name not in AMBIGUOUS_WHEN_EVEN])
several = st.sampled_from(SEVERAL)

# Optimizers. A large eps keeps Adam from turning the rounding of a zero gradient into a step.

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-nesterov-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True),
    "adam-groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.02}, {"params": p[1:], "weight_decay": 0.1}], lr=0.01, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-2),
}  # fmt: skip
optimizers = st.sampled_from(sorted(OPTIMIZERS))
clip_norms = st.sampled_from([None, 0.05, 0.5, 1e6])

# Losses nobody has written yet: operations in a row below a mean, and operations above it. None ends in a factor: a sum
# of scaled values may hide a count, and is refused.

Operation = Callable[[Tensor], Tensor]
SAMPLE_BY_SAMPLE: dict[str, Operation] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "square": lambda x: x.tanh() ** 2,
    "gelu": F.gelu,
    "negative": lambda x: 0.2 - x,
    "softmax-last": lambda x: x.softmax(-1),
    "log-softmax-last": lambda x: x.log_softmax(-1),
    "logsumexp-last": lambda x: x.logsumexp(-1, keepdim=True).expand_as(x).sigmoid(),
    "cumsum-last": lambda x: x.cumsum(-1).tanh(),
    "flip-last": lambda x: x.flip(-1) * torch.linspace(0.2, 1, x.shape[-1], dtype=x.dtype),
    "centre-last": lambda x: x - x.mean(-1, keepdim=True),
    "centre-inner": lambda x: x - x.mean((1, 2), keepdim=True),
    "norm-inner": lambda x: x / (1 + x.norm(dim=(1, 2), keepdim=True)),
    "amax-last": lambda x: x + x.amax(-1, keepdim=True),
    "swap-inner": lambda x: x.transpose(1, 2),
    "around": lambda x: x.permute(2, 0, 1).softmax(0).permute(1, 2, 0),
    "merge-inner": lambda x: x.flatten(1).softmax(1).view_as(x),
    "merge-rows": lambda x: x.reshape(-1, x.shape[-1]).log_softmax(-1).view_as(x),
    "halves-last": lambda x: torch.cat([c * (i + 1) for i, c in enumerate(x.chunk(2, -1))], -1),
    "halves-inner": lambda x: torch.cat([x[:, 1:], x[:, :1].tanh()], 1),
    "steps": lambda x: F.pad((x[:, 1:] - x[:, :-1]), (0, 0, 0, 1)),
    "unbind-inner": lambda x: torch.stack([c / (i + 1) for i, c in enumerate(x.unbind(1))], 1),
    "sort-last": lambda x: x.sort(-1).values,
    "layer-norm": lambda x: x + F.layer_norm(x, x.shape[2:]),  # alone, its mean is a constant
    "bmm": lambda x: torch.bmm(x, x.mT).softmax(-1) @ x,
    "einsum": lambda x: torch.einsum("nij,nkj->nik", x, x).softmax(-1) @ x,
    "pair-chunks": lambda x: torch.sub(*torch.cat([x, x.tanh()]).chunk(2)),
    "pair-rows": lambda x: torch.cat([x, x.tanh()]).view(2, *x.shape).softmax(0)[0],
    "pair-stacked": lambda x: torch.stack([x, x.tanh()]).softmax(0)[0],
    "where": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "clamp": lambda x: x.clamp(-0.8, 1.1),
}
ACROSS_SAMPLES: dict[str, Operation] = {
    "softmax-first": lambda x: x.softmax(0),
    "centre-first": lambda x: x - x.mean(0),
    "centre-all": lambda x: x - x.mean(),
    "centre-first-two": lambda x: x - x.mean((0, 1)),
    "cumsum-first": lambda x: x.cumsum(0),
    "flip-first": lambda x: x * x.flip(0),
    "roll-first": lambda x: x * x.roll(1, 0),
    "sort-first": lambda x: x.sort(0).values * torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None, None],
    "amax-first": lambda x: x - x.amax(0),
    "std-first": lambda x: x / (1 + x.std(0, unbiased=False)),
    "gram": lambda x: ((x.flatten(1) @ x.flatten(1).t()).softmax(1) @ x.flatten(1)).view_as(x),
    "flatten-softmax": lambda x: x.flatten().softmax(0).view_as(x),
    "row-softmax": lambda x: x.reshape(1, -1).softmax(1).view_as(x),
    "merge-columns": lambda x: x.permute(2, 0, 1).flatten(1).softmax(1).unflatten(1, x.shape[:2]).permute(1, 2, 0),
    "swap-first": lambda x: x.transpose(0, 1).softmax(1).transpose(0, 1),
    "all-pairs": lambda x: (x[:, None] - x[None]).tanh().mean(1),
    "first-sample": lambda x: x - x[:1],
    "last-sample": lambda x: x * x[-1],
    "reverse-rows": lambda x: x + x.flatten(0, 1).flip(0).view_as(x),
    "norm-all": lambda x: x / (1 + x.norm()),
    "pair-neighbours": lambda x: torch.cat([x, x.tanh()]).view(len(x), 2, *x.shape[1:]).prod(1),
    "pair-interleaved": lambda x: torch.cat([x, x.tanh()])[::2] * torch.cat([x, x.tanh()])[1::2],
    "pair-picked": lambda x: torch.cat([x, x.tanh()]).view(len(x), 2, *x.shape[1:])[:, 0] * x,
    "pair-shuffled": lambda x: torch.mul(*torch.cat([x, x.tanh()])[torch.arange(2 * len(x)).flip(0).roll(1)].chunk(2)),
    "shift-rows": lambda x: x.flatten(0, 1).roll(1, 0).view_as(x) * x,
}
REDUCTIONS: dict[str, Operation] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "mean-of-means": lambda x: x.mean((1, 2)).mean(),
    "mean-of-sums": lambda x: x.sum(1).mean((0, 1)),
    "mean-first": lambda x: x.mean(0).mean(),
    "sum-of-means": lambda x: x.mean(-1).sum(),
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "ce": lambda x: F.cross_entropy(x.flatten(0, 1), (torch.arange(x.shape[1]) % x.shape[-1]).repeat(len(x))),
}
ABOVE: dict[str, Operation] = {
    "scale": lambda x: 0.3 * x,
    "negative": torch.neg,
    "divide": lambda x: x / 7,
    "twice": lambda x: x + 0.1 * x,
    "stack": lambda x: torch.stack([x, 2 * x]).mean(),
    "view": lambda x: x.view(1, 1).squeeze(),
}
NONLINEAR: dict[str, Operation] = {
    "exp": torch.exp,
    "square": torch.square,
    "tanh": torch.tanh,
    "self-product": lambda x: x * x,
    "abs": torch.abs,
}


@dataclass(frozen=True)
class Chain:
    """Operations below a reduction, and above it; prints as their names."""

    below: tuple[str, ...]
    reduction: str
    above: tuple[str, ...]

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        """The loss."""
        value: Tensor = model(batch["x"])  # (n, STEPS, CLASSES)
        for name in self.below:
            value = {**SAMPLE_BY_SAMPLE, **ACROSS_SAMPLES}[name](value)
        value = REDUCTIONS[self.reduction](value)
        for name in self.above:
            value = {**ABOVE, **NONLINEAR}[name](value)
        return value


def _chain(below: tuple[str, ...], reduction: str, above: tuple[str, ...]) -> Loss:
    return Loss(" > ".join((*below, reduction, *above)), mlp(), sequences, Chain(below, reduction, above))


def _chain_apart(below: tuple[str, ...], reduction: str, above: tuple[str, ...]) -> Loss:
    """With one sample, `einsum` and `view` lose its dimension, and the graph no longer shows which one it was."""
    lost = {"einsum", "pair-chunks", "pair-rows"} & set(below)
    return replace(_chain(below, reduction, above), smallest=2 if lost else 1)


def _names(table: dict[str, Operation], longest: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(table)), max_size=longest).map(tuple)


# Nor do factors stand above the sums here.
apart = st.one_of(
    st.builds(
        _chain_apart,
        _names(SAMPLE_BY_SAMPLE, 4),
        st.sampled_from(sorted({*REDUCTIONS} - {"sum", "sum-of-means"})),
        _names(ABOVE, 2),
    ),
    st.builds(_chain_apart, _names(SAMPLE_BY_SAMPLE, 4), st.sampled_from(["sum", "sum-of-means"]), st.just(())),
)
anything = st.builds(
    _chain,
    _names({**SAMPLE_BY_SAMPLE, **ACROSS_SAMPLES}, 4),
    st.sampled_from(sorted(REDUCTIONS)),
    _names({**ABOVE, **NONLINEAR}, 1),
)

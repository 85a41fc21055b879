# ruff: noqa: D102, E501, PLC3002  (a row of a table is a line)
# fmt: off
"""Every loss that must be read from its graph alone, those that need their counts, and those that may go either way.

A row is a `samples.Loss`. `READABLE` must be exact with no argument at all. `SEVERAL` needs `counts=`. `EITHER` may be
read or refused, but if it is read it must be exact: these are the losses that would tempt a reader to guess.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from tests.support.samples import (
    CLASSES,
    STEPS,
    Attention,
    Batch,
    Line,
    Loss,
    Recurrent,
    Tempered,
    Tokens,
    conv,
    images,
    mlp,
    rows,
    seeded,
    sequences,
)

Function = Callable[[Any, Batch], Tensor]
WEIGHT = torch.tensor([0.3, 1.7, 0.9, 2.4], dtype=torch.float64)
SHAPES: dict[int, tuple[int, ...]] = {2: (), 3: (3,), 4: (2, 3)}


# Cross-entropy: every mix of its options.

def cross_entropies() -> Iterator[Loss]:
    """`F.cross_entropy` on inputs of 2 to 4 dimensions in all mixes; on 2-D inputs also as a module."""
    options = itertools.product((2, 3, 4), ("label", "partly", "probs"), (False, True), (0.0, 0.1), ("mean", "sum"), (False, True))
    for dimensions, target, weighted, smoothing, reduction, module in options:
        if module and dimensions > 2:
            continue

        def loss(model: nn.Module, b: Batch, *, y: str = target, by: bool = weighted, module: bool = module, options: Any = {"label_smoothing": smoothing, "reduction": reduction}) -> Tensor:  # noqa: B006
            weight = WEIGHT.to(b["x"].dtype) if by else None
            if module:
                return nn.CrossEntropyLoss(weight, **options)(model(b["x"]), b[y])
            return F.cross_entropy(model(b["x"]), b[y], weight, **options)

        def count(b: Batch, y: str = target, *, by: bool = weighted) -> float:
            if y == "probs":
                return b["probs"].numel() / CLASSES
            kept = b[y][b[y] != -100]
            return float(WEIGHT[kept].sum()) if by else float(kept.numel())

        kind = {"label": "indices", "partly": "ignored", "probs": "probabilities"}[target]
        words = ["module" if module else "functional", f"{dimensions}-D", kind, *["weights"] * weighted, *["smoothing"] * bool(smoothing), reduction]
        model, batch = (mlp(), rows) if dimensions == 2 else (conv(dimensions - 2), images(*SHAPES[dimensions]))
        yield Loss("cross_entropy-" + "-".join(words), model, batch, loss, count=count if reduction == "mean" else None)


# The other losses of torch.nn.functional.

def _log_probs(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).log_softmax(1)

def twice(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two outputs of one model."""
    return model(batch["x"]), model(batch["x2"])

def _thrice(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return *twice(model, batch), model(batch["x3"])

def _ctc(model: nn.Module, batch: Batch, reduction: str, *, zero_infinity: bool = False) -> Tensor:
    scores = model(batch["x"]).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(scores, batch["ctc"], batch["ctc_inputs"], batch["ctc_lengths"], reduction=reduction, zero_infinity=zero_infinity)


# Losses of an output and one target, whose mean is over the target's elements or over its rows.
DIRECT: dict[str, tuple[Callable[..., Tensor], str, int]] = {
    "mse": (F.mse_loss, "value", CLASSES), "l1": (F.l1_loss, "value", CLASSES), "smooth_l1": (F.smooth_l1_loss, "value", CLASSES), "huber": (functools.partial(F.huber_loss, delta=0.7), "value", CLASSES),
    "bce": (lambda out, y, **how: F.binary_cross_entropy(out.sigmoid(), y, **how), "unit", CLASSES), "bce_with_logits": (F.binary_cross_entropy_with_logits, "unit", CLASSES),
    "bce_with_logits-pos_weight": (functools.partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT), "unit", CLASSES), "poisson_nll": (F.poisson_nll_loss, "events", CLASSES),
    "kl_div": (lambda out, y, **how: F.kl_div(out.log_softmax(1), y, **how), "probs", CLASSES), "soft_margin": (F.soft_margin_loss, "signs", CLASSES), "multi_margin": (F.multi_margin_loss, "label", 1),
    "multilabel_margin": (F.multilabel_margin_loss, "many", 1), "multilabel_soft_margin": (F.multilabel_soft_margin_loss, "binary", 1), "nll": (lambda out, y, **how: F.nll_loss(out.log_softmax(1), y, **how), "label", 1),
}
# name: (loss given the model, the batch and a reduction; its count when the reduction is a mean)
PAIRWISE: dict[str, tuple[Any, Callable[[Batch], float]]] = {
    **{name: (lambda m, b, r, f=f, y=y: f(m(b["x"]), b[y], reduction=r), functools.partial(lambda each, b: each * len(b["x"]), each)) for name, (f, y, each) in DIRECT.items()},
    "gaussian_nll": (lambda m, b, r: F.gaussian_nll_loss(m(b["x"]), b["value"], F.softplus(m(b["x2"])), reduction=r), lambda b: b["value"].numel()),
    "margin_ranking": (lambda m, b, r: F.margin_ranking_loss(*twice(m, b), b["signs"], margin=0.2, reduction=r), lambda b: b["signs"].numel()),
    "cosine_embedding": (lambda m, b, r: F.cosine_embedding_loss(*twice(m, b), b["sign"], margin=0.1, reduction=r), lambda b: len(b["sign"])),
    "triplet_margin": (lambda m, b, r: F.triplet_margin_loss(*_thrice(m, b), reduction=r), lambda b: len(b["x"])),
    "triplet_margin-distance": (lambda m, b, r: F.triplet_margin_with_distance_loss(*_thrice(m, b), reduction=r), lambda b: len(b["x"])),
    "nll-ignored": (lambda m, b, r: F.nll_loss(_log_probs(m, b), b["partly"], reduction=r), lambda b: int((b["partly"] != -100).sum())),
    "nll-ignore_index": (lambda m, b, r: F.nll_loss(_log_probs(m, b), b["label"], ignore_index=2, reduction=r), lambda b: int((b["label"] != 2).sum())),
}

def torch_losses() -> Iterator[Loss]:
    """Each row of PAIRWISE as a mean and as a sum, and those that need other data."""
    for (name, (function, count)), how in itertools.product(PAIRWISE.items(), ("mean", "sum")):
        yield Loss(f"{name}-{how}", mlp(), rows, functools.partial(lambda f, how, m, b: f(m, b, how), function, how), count=count if how == "mean" else None)
    yield Loss("ctc-mean", mlp(), sequences, lambda m, b: _ctc(m, b, "mean"), count=lambda b: len(b["x"]))
    yield Loss("ctc-sum", mlp(), sequences, lambda m, b: _ctc(m, b, "sum"))
    yield Loss("ctc-zero_infinity", mlp(), sequences, lambda m, b: _ctc(m, b, "mean", zero_infinity=True))
    yield Loss("kl_div-batchmean", mlp(), rows, lambda m, b: F.kl_div(_log_probs(m, b), b["probs"], reduction="batchmean"), count=lambda b: len(b["x"]))


# Preferences.

def _token_log_probs(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    each = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return (each * mask[:, 1:]).sum(-1)

def _dpo_two_calls(model: nn.Module, batch: Batch) -> Tensor:
    chosen = _token_log_probs(model(batch["tokens"]), batch["tokens"], batch["mask"])
    rejected = _token_log_probs(model(batch["others"]), batch["others"], batch["mask"])
    reference = batch["reference"][:, 0] - batch["reference"][:, 1]
    return -F.logsigmoid(0.1 * (chosen - rejected - reference)).mean()

def _dpo_one_call(model: nn.Module, batch: Batch) -> Tensor:
    tokens = torch.cat([batch["tokens"], batch["others"]])
    log_probs = _token_log_probs(model(tokens), tokens, batch["mask"].repeat(2, 1))
    chosen, rejected = log_probs.chunk(2)
    margins = 0.1 * ((chosen - batch["reference"][:, 0]) - (rejected - batch["reference"][:, 1]))
    return (-F.logsigmoid(margins) * 0.9 - F.logsigmoid(-margins) * 0.1).mean()

def _rewards_chunk(model: nn.Module, batch: Batch) -> Tensor:
    chosen, rejected = model(torch.cat([batch["x"], batch["x2"]])).squeeze(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()

def _rewards_of_calls(model: nn.Module, batch: Batch) -> Tensor:
    return torch.cat(twice(model, batch)).view(2, -1)

def _policy_gradient(model: nn.Module, batch: Batch) -> Tensor:
    log_prob = _log_probs(model, batch).gather(1, batch["label"][:, None]).squeeze(1)
    ratio = (log_prob - batch["probs"].log().gather(1, batch["label"][:, None]).squeeze(1)).exp()
    return -torch.min(ratio * batch["scalar"], ratio.clamp(0.8, 1.2) * batch["scalar"]).mean()


PREFERENCES = [
    Loss("reward-chunk", mlp(1), rows, _rewards_chunk),
    Loss("reward-calls-viewed", mlp(1), rows, lambda m, b: -F.logsigmoid((r := _rewards_of_calls(m, b))[0] - r[1]).mean(), smallest=2),
    Loss("reward-calls-compared", mlp(1), rows, lambda m, b: -_rewards_of_calls(m, b).log_softmax(0)[0].mean(), smallest=2),
    Loss("dpo-two-calls", seeded(Tokens), sequences, _dpo_two_calls),
    Loss("dpo-one-call", seeded(Tokens), sequences, _dpo_one_call),
    Loss("ppo-clipped", mlp(), rows, _policy_gradient),
]


# Means and sums written by hand, and what may stand between them and the model.

def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Squared errors, one per element."""
    return (model(batch["x"]) - batch["value"]) ** 2

def _per_sample_dice(model: nn.Module, batch: Batch) -> Tensor:
    p = model(batch["x"]).sigmoid()
    overlap = (p * batch["binary"]).sum((2, 3))
    return (1 - (2 * overlap + 1) / (p.sum((2, 3)) + batch["binary"].sum((2, 3)) + 1)).mean()

def _masked_mean_per_sequence(model: nn.Module, batch: Batch) -> Tensor:
    each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["tokens"], reduction="none")
    return ((each * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()

def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(logits.reshape(-1, CLASSES), batch["labels"][:, 1:].reshape(-1))

def _masked_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"])[batch["mask"]], batch["tokens"][batch["mask"]])

def _vae(model: nn.Module, batch: Batch) -> Tensor:
    mean, log_variance = model(batch["x"]).chunk(2, dim=1)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return (mean - batch["value"][:, :2]).pow(2).sum(1).mean() + divergence.mean()

def _vae_of_sums(model: nn.Module, batch: Batch) -> Tensor:
    mean, log_variance = model(batch["x"]).chunk(2, dim=1)
    error = F.mse_loss(mean, batch["value"][:, :2], reduction="sum")
    return error - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())

def _si_sdr(model: nn.Module, batch: Batch) -> Tensor:
    estimate, target = model(batch["x"]), torch.cat([batch["x2"], batch["value"]], dim=1)
    projected = (estimate * target).sum(1, keepdim=True) * target / target.square().sum(1, keepdim=True)
    return -(projected.square().sum(1) / (estimate - projected).square().sum(1)).log().mean()

class Grid(nn.Module):
    """A small matrix per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, 3, 4)

def _grid_of(batch: Batch) -> Tensor:
    return batch["x2"][:, :, None] * batch["value"][:, None]

def _arc_margin(model: nn.Module, batch: Batch) -> Tensor:
    cosine = model(batch["x"]).tanh()
    rows, margin = torch.arange(len(cosine)), cosine.clone()
    margin[rows, batch["label"]] = (cosine[rows, batch["label"]].acos() + 0.5).cos()
    return F.cross_entropy(8 * margin, batch["label"])

def _arc_margin_by_mask(model: nn.Module, batch: Batch) -> Tensor:
    cosine, own = model(batch["x"]).tanh(), F.one_hot(batch["label"] % 3, 3)
    target = cosine[own == 1]
    return F.cross_entropy(8 * (cosine + own * ((target.acos() + 0.4).cos() - target)[:, None]), batch["label"] % 3)

def _filled(model: nn.Module, batch: Batch, dim: int) -> Tensor:
    n = len(batch["x"])
    out = torch.zeros((STEPS, n, CLASSES) if dim == 0 else (n, STEPS, CLASSES), dtype=torch.float64)
    for step in range(STEPS):
        out.select(dim, step).copy_(model(batch["x"][:, step]))
    return out


TAILS = [
    Loss("mean", mlp(), rows, lambda m, b: squares(m, b).mean(), count=lambda b: b["value"].numel()),
    Loss("sum", mlp(), rows, lambda m, b: squares(m, b).sum()),
    Loss("mean-several-dims", conv(2), images(2, 3), lambda m, b: squares(m, b).mean((0, 2, 3)).mean()),
    Loss("mean-inner-then-outer", conv(2), images(2, 3), lambda m, b: squares(m, b).mean((1, 2, 3)).mean()),
    Loss("sum-of-features-mean-of-samples", mlp(), rows, lambda m, b: squares(m, b).sum(1).mean()),
    Loss("mean-of-features-sum-of-samples", mlp(), rows, lambda m, b: squares(m, b).mean(1).sum()),
    Loss("mean-reshaped", conv(2), images(2, 3), lambda m, b: squares(m, b).reshape(-1, 3).sum(1).mean()),
    Loss("mean-after-transposed-sum", conv(2), images(2, 3), lambda m, b: squares(m, b).permute(2, 0, 3, 1).sum((0, 3)).mean()),
    Loss("mean-of-last-step", mlp(), sequences, lambda m, b: squares(m, b)[:, -1].mean()),
    Loss("mean-of-own-label", mlp(), rows, lambda m, b: -_log_probs(m, b)[torch.arange(len(b["x"])), b["label"]].mean()),
    Loss("mean-of-lengths", mlp(), sequences, lambda m, b: squares(m, b)[torch.arange(len(b["x"])), b["lengths"] - 1].mean()),
    Loss("mean-of-unfold", mlp(), sequences, lambda m, b: squares(m, b).unfold(1, 2, 1).mean()),
    Loss("mean-of-concatenated-features", mlp(), rows, lambda m, b: torch.cat(twice(m, b), dim=1).pow(2).mean()),
    Loss("mean-of-concatenated-samples", mlp(), rows, lambda m, b: torch.cat(twice(m, b)).pow(2).mean()),
    Loss("mean-of-broadcast-classes", mlp(), rows, lambda m, b: (m(b["x"])[:, :, None] - m(b["x2"])[:, None]).pow(2).mean()),
    Loss("einsum-per-sample", mlp(), rows, lambda m, b: torch.einsum("nd,nd->n", *twice(m, b)).tanh().mean(), smallest=2),
    Loss("bmm-per-sample", mlp(), sequences, lambda m, b: (m(b["x"]) @ m(b["x"]).mT).softmax(-1).pow(2).mean()),
    Loss("instance-normalized", conv(2), images(4, 4), lambda m, b: F.instance_norm(m(b["x"])).exp().mean()),
    Loss("dice-per-sample", conv(2), images(4, 4), _per_sample_dice),
    Loss("vae", mlp(), rows, _vae),
    Loss("next-token", seeded(Tokens), sequences, _next_token, count=lambda b: int((b["labels"][:, 1:] != -100).sum())),
    Loss("next-token-tied", seeded(lambda: Tokens("tied")), sequences, _next_token),
    Loss("classes-second", mlp(), sequences, lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"])),
    Loss("masked-tokens", mlp(), sequences, _masked_tokens, count=lambda b: int(b["mask"].sum())),
    Loss("masked-select-mean", mlp(), sequences, lambda m, b: squares(m, b).masked_select(b["mask"][..., None]).mean()),
    Loss("masked-mean-per-sequence", mlp(), sequences, _masked_mean_per_sequence, count=lambda b: len(b["x"])),
    Loss("sum-halved", mlp(), rows, lambda m, b: -0.5 * squares(m, b).sum()),
    Loss("sum-over-two", mlp(3), rows, lambda m, b: (m(b["x"]) - b["x2"]).square().sum() / 2, smallest=3),
    Loss("sum-times-number", mlp(), rows, lambda m, b: 0.01 * squares(m, b).sum()),
    Loss("sum-over-elements", mlp(3), rows, lambda m, b: (m(b["x"]) - b["x2"]).square().sum() / b["x2"].numel(), count=lambda b: b["x2"].numel(), smallest=2),
    Loss("sum-over-rows", mlp(), rows, lambda m, b: squares(m, b).sum() / len(b["x"]), count=lambda b: len(b["x"])),
    Loss("sum-of-each-over-rows", mlp(), rows, lambda m, b: (squares(m, b) / len(b["x"])).sum(), count=lambda b: len(b["x"])),
    Loss("ce-sum-of-flattened-over-rows", mlp(), sequences, lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["tokens"].flatten(), reduction="sum") / len(b["x"]), count=lambda b: len(b["x"]), smallest=2),
    Loss("stacked-sum-over-two", mlp(), rows, lambda m, b: torch.stack([squares(m, b), m(b["x2"]).square()]).sum() / 2, smallest=3),
    Loss("vae-of-sums", mlp(), rows, _vae_of_sums),
    Loss("si-sdr", seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 7))), rows, _si_sdr),
    Loss("mean-of-a-mean", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]).mean()),
    Loss("distances-within-samples", seeded(Grid), rows, lambda m, b: torch.cdist(m(b["x"]), m(b["x"]).sin()).mean(), smallest=2),
    Loss("distances-to-own-targets", seeded(Grid), rows, lambda m, b: torch.cdist(m(b["x"]), _grid_of(b)).amin(1).mean(), smallest=2),
    Loss("product-with-own-targets", seeded(Grid), rows, lambda m, b: (m(b["x"]) @ _grid_of(b).mT).tanh().mean(), smallest=2),
    Loss("einsum-with-targets", mlp(), rows, lambda m, b: torch.einsum("bi,bi->b", m(b["x"]), b["value"]).tanh().mean(), smallest=2),
    Loss("spectrogram", seeded(Grid), rows, lambda m, b: torch.stft(m(b["x"]).flatten(1), 8, window=torch.ones(8).double(), return_complex=True).abs().mean(), smallest=2),
    Loss("multivariate-normal", seeded(Grid), rows, lambda m, b: -torch.distributions.MultivariateNormal((out := m(b["x"]))[:, 0, :3], out @ out.mT + torch.eye(3).double()).log_prob(b["x2"]).mean(), smallest=2),
    Loss("put-back-by-a-mask", mlp(), rows, lambda m, b: (lambda out, mask: torch.zeros_like(out).index_put((mask,), out[mask] * 2).square().mean())(m(b["x"])[:, 0], b["scalar"] > -9)),
    Loss("arc-margin-by-index", mlp(), rows, _arc_margin),
    Loss("arc-margin-by-mask", mlp(3), rows, _arc_margin_by_mask, smallest=4),
    Loss("filled-step-by-step", mlp(), sequences, lambda m, b: F.cross_entropy(_filled(m, b, 0).permute(1, 2, 0), b["labels"])),
    Loss("multiple-choice", mlp(1), rows, lambda m, b: F.cross_entropy(m(torch.stack([b["x"], b["x2"], b["x3"]], 1).flatten(0, 1)).view(-1, 3), b["label"] % 3), smallest=2),
]


# Terms: their factors and their sums.

def _total(terms: Sequence[Tensor]) -> Tensor:
    result = sum(terms)
    assert isinstance(result, Tensor)
    return result

def two_heads(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """A cross-entropy and a squared error, both over the same samples."""
    out = model(batch["x"])
    return F.cross_entropy(out, batch["label"]), F.mse_loss(out, batch["value"])

def _uncertainty(model: Any, batch: Batch) -> Tensor:
    ce, mse = two_heads(model, batch)
    return (-model.s).exp() * ce + model.s + 0.5 * (-model.t).exp() * mse + 0.5 * model.t


SUMS_OF_TERMS = [
    Loss("two-terms", mlp(), rows, lambda m, b: _total(two_heads(m, b))),
    Loss("factor", mlp(), rows, lambda m, b: 0.3 * squares(m, b).mean()),
    Loss("factor-tensor", mlp(), rows, lambda m, b: squares(m, b).mean() * torch.tensor(0.3, dtype=torch.float64)),
    Loss("subtracted", mlp(), rows, lambda m, b: two_heads(m, b)[1] - 0.2 * two_heads(m, b)[0]),
    Loss("add-alpha", mlp(), rows, lambda m, b: torch.add(*two_heads(m, b), alpha=0.4)),
    Loss("factors-nested", mlp(), rows, lambda m, b: -0.5 * ((two_heads(m, b)[0] / 2 - 3 * two_heads(m, b)[1]) * 0.1)),
    Loss("steps-unrolled", mlp(), sequences, lambda m, b: _total([F.cross_entropy(m(b["x"][:, t]), b["tokens"][:, t]) for t in range(STEPS)]) / STEPS),
    Loss("stack-mean", mlp(), rows, lambda m, b: torch.stack(two_heads(m, b)).mean()),
    Loss("stack-weighed", mlp(), rows, lambda m, b: (torch.stack(two_heads(m, b)) * torch.tensor([0.3, 0.7], dtype=torch.float64)).sum()),
    Loss("cat-sum", mlp(), rows, lambda m, b: torch.cat([t.view(1) for t in two_heads(m, b)]).sum()),
    Loss("uncertainty-one-term", seeded(Tempered), rows, lambda m, b: (-m.s).exp() * squares(m, b).mean() + m.s),
    Loss("uncertainty-two-terms", seeded(Tempered), rows, _uncertainty),
    Loss("learned-weight", seeded(Tempered), rows, lambda m, b: F.softplus(m.s) * two_heads(m, b)[0] / (1 + m.t**2)),
]


# Regularisers: parameters alone, counted once per window.

def l2(model: nn.Module) -> Tensor:
    """Sum of squares over all parameters."""
    return sum((p.pow(2).sum() for p in model.parameters()), torch.zeros((), dtype=torch.float64))


REGULARISERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "l2": lambda m: 0.5 * l2(m),
    "norm": lambda m: 0.1 * next(m.parameters()).norm(),
    "norms": lambda m: 0.1 * sum(p.norm() for p in m.parameters()),
    "root": lambda m: 0.1 * l2(m).sqrt(),
    "sum-of-all-parameters": lambda m: torch.stack([p.sum() for p in m.parameters()]).sum() * 0.1,
}

def regularised() -> Iterator[Loss]:
    """Each regulariser beside a mean, a sum and a masked mean."""
    data: dict[str, Function] = {
        "mean": lambda m, b: squares(m, b).mean(),
        "sum": lambda m, b: squares(m, b).sum(),
        "ignored": lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]),
    }

    for (kind, main), (name, term) in itertools.product(data.items(), REGULARISERS.items()):
        yield Loss(f"{kind}+{name}", mlp(), rows, functools.partial(lambda main, term, m, b: main(m, b) + term(m), main, term), told=kind != "sum")
    yield Loss("term-first", mlp(), rows, lambda m, b: l2(m) + squares(m, b).mean())
    yield Loss("term-subtracted", mlp(), rows, lambda m, b: squares(m, b).mean() - 0.7 * next(m.parameters()).norm())


# Models whose last operations stand in the graph's tail.

def _gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).pow(2).mean()

def _r1(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.softplus(-out).mean() + 5 * slope.pow(2).sum(1).mean()

def _lora() -> nn.Module:
    body = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.0), nn.Linear(6, CLASSES))
    for index in (0, 3, 6):
        body[index].requires_grad_(requires_grad=False)
    return body

def _headed(head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), head)

class Computed(nn.Module):
    """A head whose weight is a function of its parameter."""

    def __init__(self, weight: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(3, 5), weight
        self.w = nn.Parameter(torch.randn(CLASSES, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x).tanh(), self.weight(self.w))

class Merged(nn.Module):
    """A trained weight and its low-rank adapter, merged at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, CLASSES)
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x).tanh(), self.head.weight + 0.5 * self.b @ self.a, self.head.bias)

class Adapted(Merged):
    """The same with a frozen base, and with DoRA's learned size of each row."""

    def __init__(self, *, sized: bool) -> None:
        super().__init__()
        self.head.requires_grad_(requires_grad=False)
        self.size, self.sized = nn.Parameter(torch.ones(CLASSES)), sized

    def forward(self, x: Tensor) -> Tensor:
        weight = self.head.weight + 0.5 * self.b @ self.a
        if self.sized:
            weight = self.size[:, None] * weight / weight.norm(dim=1, keepdim=True)
        return F.linear(self.body(x).tanh(), weight, self.head.bias)

class Sign(torch.autograd.Function):
    """Weights of ±1 with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        del ctx
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


HEADS: dict[str, Callable[[], nn.Module]] = {
    "spectral-norm": lambda: _headed(spectral_norm(nn.Linear(5, CLASSES)).eval()),
    "old-spectral-norm": lambda: _headed(old_spectral_norm(nn.Linear(5, CLASSES)).eval()),
    "orthogonal-householder": lambda: _headed(orthogonal(nn.Linear(5, CLASSES), orthogonal_map="householder")),
    "frozen-lora": lambda: Adapted(sized=False),
    "dora": lambda: Adapted(sized=True),
    "binarized": lambda: Computed(lambda w: w.sign().detach() * w.abs().mean(1, keepdim=True)),
    "straight-through": lambda: Computed(lambda w: w + (w.sign() - w).detach()),
    "custom-straight-through": lambda: Computed(Sign.apply),
}

class Factors(nn.Module):
    """A row for each user and for each thing, held as plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Parameter(torch.randn(CLASSES, 3)), nn.Parameter(torch.randn(CLASSES, 3))
        self.bias = nn.Parameter(torch.randn(CLASSES))

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users[user] * self.things[thing]).sum(1) + self.bias[thing]

def _bpr(model: nn.Module, batch: Batch) -> Tensor:
    better, worse = model(batch["label"], batch["many"][:, 0]), model(batch["label"], batch["many"][:, 1])
    return -F.logsigmoid(better - worse)


MODELS = [
    Loss("line", seeded(Line), rows, lambda m, b: ((m.w * b["x"] + m.b - b["x2"]) ** 2).mean(), count=lambda b: b["x"].numel()),
    Loss("lstm", seeded(lambda: Recurrent(nn.LSTM, batch_first=True)), sequences, lambda m, b: squares(m, b).mean()),
    Loss("lstm-time-major", seeded(lambda: Recurrent(nn.LSTM, batch_first=False)), sequences, lambda m, b: F.mse_loss(m(b["x"].transpose(0, 1)).transpose(0, 1), b["value"])),
    Loss("attention", seeded(Attention), sequences, lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"])),
    Loss("conv", conv(2), images(4, 4), lambda m, b: F.mse_loss(m(b["x"]), b["value"]), count=lambda b: b["value"].numel()),
    Loss("frozen-batch-norm", seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval())), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"])),
    Loss("lora", seeded(_lora), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])),
    Loss("frozen-head", seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4).requires_grad_(requires_grad=False))), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])),
    *(Loss(f"{name}-head", seeded(make), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])) for name, make in HEADS.items()),
    Loss("merged-lora-head", seeded(Merged), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])),
    Loss("distances-to-computed", seeded(lambda: Computed(torch.tanh)), rows, lambda m, b: torch.cdist(m.body(b["x"]), m.w.tanh()).amin(1).mean()),
    Loss("factors", seeded(Factors), rows, lambda m, b: (m(b["label"], b["many"][:, 0]) - b["scalar"]).square().mean(), count=lambda b: len(b["x"])),
    Loss("factors-selected", seeded(Factors), rows, lambda m, b: (m.users.index_select(0, b["label"]) * m.things.index_select(0, b["many"][:, 0])).sum(1).square().mean()),
    Loss("factors-decayed-by-hand", seeded(Factors), rows, lambda m, b: _bpr(m, b).sum() / len(b["x"]) + 0.1 * m.users[b["label"]].square().sum() / len(b["x"])),
    Loss("bpr", seeded(Factors), rows, lambda m, b: _bpr(m, b).mean(), count=lambda b: len(b["x"])),
    Loss("gradient-penalty", mlp(1), rows, _gradient_penalty),
    Loss("gradient-penalty-r1", mlp(1), rows, _r1),
]


HALVES = [  # of sums: the sizes may be those of features, and either divisor may be the count
    Loss("half-mse-sum-over-len", mlp(1), rows, lambda m, b: F.mse_loss(m(b["x"])[:, 0], b["scalar"], reduction="sum") / len(b["x"]) / 2),
    Loss("half-ce-sum-over-len", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"], reduction="sum") / len(b["x"]) / 2),
    Loss("dot-over-len", mlp(1), rows, lambda m, b: torch.dot(m(b["x"])[:, 0], b["scalar"]) / len(b["x"])),
    Loss("heads-of-a-stack", mlp(), rows, lambda m, b: torch.stack([F.cross_entropy(p, b["label"]) for p in torch.stack([m(b["x"]), m(b["x2"])])]).sum()),
]

READABLE: list[Loss] = [*HALVES, *cross_entropies(), *torch_losses(), *PREFERENCES, *TAILS, *SUMS_OF_TERMS, *regularised(), *MODELS]


# Terms whose counts are in no constant ratio: their totals must be known in advance.

def kept(batch: Batch) -> int:
    """Targets that are not ignored."""
    return int((batch["labels"] != -100).sum())

def masked_and_mean(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over the tokens that count, and one over all of them."""
    out = model(batch["x"])
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten()) + 0.3 * F.mse_loss(out, batch["value"])

def _two_maskings(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["partly"]) - 0.2 * F.cross_entropy(-out, batch["label"], ignore_index=0)


SEVERAL = [
    Loss("masked+mean", mlp(), sequences, masked_and_mean, counts=lambda b: (kept(b), b["value"].numel())),
    Loss("masked+mean+once", mlp(), sequences, lambda m, b: masked_and_mean(m, b) + 0.1 * l2(m), counts=lambda b: (kept(b), b["value"].numel())),
    Loss("two-maskings", mlp(), rows, _two_maskings, counts=lambda b: (int((b["partly"] != -100).sum()), int((b["label"] != 0).sum()))),
    Loss("weighted+mean", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"], weight=WEIGHT) + m(b["x"]).pow(2).mean(), counts=lambda b: (float(WEIGHT[b["label"]].sum()), b["value"].numel())),
    Loss("masked-selection+per-sequence", mlp(), sequences, lambda m, b: squares(m, b)[b["mask"]].mean() + _masked_mean_per_sequence(m, b), counts=lambda b: (CLASSES * int(b["mask"].sum()), len(b["x"]))),
    Loss("stacked", mlp(), sequences, lambda m, b: torch.stack([_masked_tokens(m, b), squares(m, b).mean()]).mean(), counts=lambda b: (int(b["mask"].sum()), b["value"].numel())),
]


# Losses that tempt a reader to guess: exact or refused, never close.

def _one_by_one(model: nn.Module, batch: Batch) -> list[Tensor]:
    return [F.mse_loss(model(x), y) for x, y in zip(batch["x"], batch["value"], strict=True)]

def _interleaved(model: nn.Module, batch: Batch) -> Tensor:
    rewards = model(torch.stack([batch["x"], batch["x2"]], dim=1).flatten(0, 1))
    return -F.logsigmoid(rewards[0::2] - rewards[1::2]).mean()


EITHER = [
    Loss("centres", seeded(Line), rows, lambda m, b: torch.cdist(b["x"], m.w.view(3, 1) * torch.eye(3).double()).min(1).values.mean()),
    Loss("list-stack-mean", mlp(), rows, lambda m, b: torch.stack(_one_by_one(m, b)).mean()),
    Loss("list-sum", mlp(), rows, lambda m, b: sum(_one_by_one(m, b), torch.zeros(()).double())),
    Loss("list-cat-mean", mlp(), rows, lambda m, b: torch.cat([squares(m, {"x": x[None], "value": v[None]}) for x, v in zip(b["x"], b["value"], strict=True)]).mean()),
    Loss("mean-times-size", mlp(), rows, lambda m, b: squares(m, b).mean() * len(b["x"])),
    Loss("mean-over-size-tensor", mlp(), rows, lambda m, b: squares(m, b).mean() / b["probs"].sum()),
    Loss("sum-over-four", mlp(), rows, lambda m, b: squares(m, b).sum() / 4),
    Loss("sum-over-one", mlp(), rows, lambda m, b: squares(m, b).sum() / 1),
    Loss("sum-of-divided-by-mask", mlp(), sequences, lambda m, b: (squares(m, b) * b["mask"][..., None] / b["mask"].sum()).sum()),
    Loss("mean-over-samples-sum-of-features", mlp(), rows, lambda m, b: squares(m, b).mean(0).sum()),
    Loss("sum-over-samples-weighed", mlp(), rows, lambda m, b: (squares(m, b).sum(0) * WEIGHT).sum()),
    Loss("sum-and-mean", mlp(), rows, lambda m, b: squares(m, b).sum() + m(b["x"]).abs().mean(), told=False),
    Loss("interleaved-pairs", mlp(1), rows, _interleaved),
    Loss("time-major-last", seeded(lambda: Recurrent(nn.GRU, batch_first=False)), sequences, lambda m, b: m(b["x"].transpose(0, 1))[-1].pow(2).mean()),
    Loss("last-hidden-state", seeded(lambda: nn.LSTM(3, CLASSES, batch_first=True)), sequences, lambda m, b: m(b["x"])[1][0][-1].pow(2).mean()),
    Loss("first-sample-only", mlp(), rows, lambda m, b: m(b["x"])[0].pow(2).mean()),
    Loss("masked-mean-by-hand", mlp(), sequences, lambda m, b: (squares(m, b).mean(-1) * b["mask"]).sum() / b["mask"].sum()),
]

# With micro-batches all of one size these are, node for node, other losses that must be read: a size cannot be told from a
# constant factor, a list of samples from a list of terms. Only uneven micro-batches show what they are.
AMBIGUOUS_WHEN_EVEN = {"list-sum", "mean-times-size", "mean-over-size-tensor", "sum-over-one", "sum-over-four", "first-sample-only"}


SPLIT = (4, 4, 2, 1)  # the micro-batches that every row is tried with

def sizes(case: Loss) -> tuple[int, ...]:
    """The split that a row is tried with."""
    return tuple(max(size, case.smallest) for size in SPLIT)

# ruff: noqa: E501, PLC3002  (a row of a table is a line)
"""Every loss that must be read from its graph alone, those that need their counts, and those that may go either way.

A row is a `samples.Loss`. `READABLE` must be exact with no argument at all. `SEVERAL` needs `counts=`. `EITHER` may be
read or refused, but if it is read it must be exact: these are the losses that would tempt a reader to guess.
"""

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


def cross_entropy(
    dimensions: int, target: str, *, weighted: bool, smoothing: float, reduction: str, module: bool
) -> Loss:
    """One row for `F.cross_entropy` (or its module) on inputs of 2 to 4 dimensions."""
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    model = mlp() if dimensions <= 2 else conv(dimensions - 2)
    batch = rows if dimensions == 2 else images(*SHAPES[dimensions])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        weight = WEIGHT.to(batch["x"].dtype) if weighted else None
        if module:
            return nn.CrossEntropyLoss(weight, **options)(model(batch["x"]), batch[target])
        return F.cross_entropy(model(batch["x"]), batch[target], weight, **options)

    def count(batch: Batch) -> float:
        if target == "probs":
            return batch["probs"].numel() / CLASSES
        kept = batch[target][batch[target] != -100]
        return float(WEIGHT[kept].sum()) if weighted else float(kept.numel())

    words = [
        "module" if module else "functional",
        f"{dimensions}-D",
        {"label": "indices", "partly": "ignored", "probs": "probabilities"}[target],
        *(["weights"] if weighted else []),
        *(["smoothing"] if smoothing else []),
        reduction,
    ]
    return Loss(
        "cross_entropy-" + "-".join(words),
        model,
        batch,
        loss,
        count=count if reduction == "mean" else None,
    )


def cross_entropies() -> Iterator[Loss]:
    """All mixes as a function; on 2-D inputs also as a module."""
    for dimensions, target, weighted, smoothing, reduction in itertools.product(
        (2, 3, 4), ("label", "partly", "probs"), (False, True), (0.0, 0.1), ("mean", "sum")
    ):
        for module in (False, True) if dimensions == 2 else (False,):
            yield cross_entropy(
                dimensions, target, weighted=weighted, smoothing=smoothing, reduction=reduction, module=module
            )


# The other losses of torch.nn.functional.


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probabilities of the classes, in dimension 1."""
    return model(batch["x"]).log_softmax(1)


def twice(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two outputs of one model."""
    return model(batch["x"]), model(batch["x2"])


def thrice(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Three outputs of one model."""
    return model(batch["x"]), model(batch["x2"]), model(batch["x3"])


def ctc(model: nn.Module, batch: Batch, reduction: str, *, zero_infinity: bool = False) -> Tensor:
    """CTC on time-major log-probabilities."""
    return F.ctc_loss(
        model(batch["x"]).log_softmax(2).transpose(0, 1),
        batch["ctc"],
        batch["ctc_inputs"],
        batch["ctc_lengths"],
        reduction=reduction,
        zero_infinity=zero_infinity,
    )


# name: (loss given the model, the batch and a reduction; its count when the reduction is a mean)
PAIRWISE: dict[str, tuple[Callable[[Any, Batch, str], Tensor], Callable[[Batch], float]]] = {
    "mse": (lambda m, b, r: F.mse_loss(m(b["x"]), b["value"], reduction=r), lambda b: b["value"].numel()),
    "l1": (lambda m, b, r: F.l1_loss(m(b["x"]), b["value"], reduction=r), lambda b: b["value"].numel()),
    "smooth_l1": (lambda m, b, r: F.smooth_l1_loss(m(b["x"]), b["value"], reduction=r), lambda b: b["value"].numel()),
    "huber": (lambda m, b, r: F.huber_loss(m(b["x"]), b["value"], reduction=r, delta=0.7), lambda b: b["value"].numel()),
    "bce": (lambda m, b, r: F.binary_cross_entropy(m(b["x"]).sigmoid(), b["unit"], reduction=r), lambda b: b["unit"].numel()),
    "bce_with_logits": (lambda m, b, r: F.binary_cross_entropy_with_logits(m(b["x"]), b["unit"], reduction=r), lambda b: b["unit"].numel()),
    "bce_with_logits-pos_weight": (lambda m, b, r: F.binary_cross_entropy_with_logits(m(b["x"]), b["unit"], pos_weight=WEIGHT, reduction=r), lambda b: b["unit"].numel()),
    "kl_div": (lambda m, b, r: F.kl_div(log_probs(m, b), b["probs"], reduction=r), lambda b: b["probs"].numel()),
    "poisson_nll": (lambda m, b, r: F.poisson_nll_loss(m(b["x"]), b["events"], reduction=r), lambda b: b["events"].numel()),
    "gaussian_nll": (lambda m, b, r: F.gaussian_nll_loss(m(b["x"]), b["value"], F.softplus(m(b["x2"])), reduction=r), lambda b: b["value"].numel()),
    "soft_margin": (lambda m, b, r: F.soft_margin_loss(m(b["x"]), b["signs"], reduction=r), lambda b: b["signs"].numel()),
    "margin_ranking": (lambda m, b, r: F.margin_ranking_loss(*twice(m, b), b["signs"], margin=0.2, reduction=r), lambda b: b["signs"].numel()),
    "cosine_embedding": (lambda m, b, r: F.cosine_embedding_loss(*twice(m, b), b["sign"], margin=0.1, reduction=r), lambda b: len(b["sign"])),
    "triplet_margin": (lambda m, b, r: F.triplet_margin_loss(*thrice(m, b), reduction=r), lambda b: len(b["x"])),
    "triplet_margin-distance": (lambda m, b, r: F.triplet_margin_with_distance_loss(*thrice(m, b), reduction=r), lambda b: len(b["x"])),
    "multi_margin": (lambda m, b, r: F.multi_margin_loss(m(b["x"]), b["label"], reduction=r), lambda b: len(b["x"])),
    "multilabel_margin": (lambda m, b, r: F.multilabel_margin_loss(m(b["x"]), b["many"], reduction=r), lambda b: len(b["x"])),
    "multilabel_soft_margin": (lambda m, b, r: F.multilabel_soft_margin_loss(m(b["x"]), b["binary"], reduction=r), lambda b: len(b["x"])),
    "nll": (lambda m, b, r: F.nll_loss(log_probs(m, b), b["label"], reduction=r), lambda b: len(b["x"])),
    "nll-ignored": (lambda m, b, r: F.nll_loss(log_probs(m, b), b["partly"], reduction=r), lambda b: int((b["partly"] != -100).sum())),
    "nll-ignore_index": (lambda m, b, r: F.nll_loss(log_probs(m, b), b["label"], ignore_index=2, reduction=r), lambda b: int((b["label"] != 2).sum())),
}  # fmt: skip


def reducing(function: Callable[[Any, Batch, str], Tensor], reduction: str) -> Function:
    """A row of PAIRWISE with one reduction."""
    return lambda m, b: function(m, b, reduction)


def torch_losses() -> Iterator[Loss]:
    """Each row of PAIRWISE as a mean and as a sum, and those that need other data."""
    for name, (function, count) in PAIRWISE.items():
        for reduction in ("mean", "sum"):
            yield Loss(
                f"{name}-{reduction}",
                mlp(),
                rows,
                reducing(function, reduction),
                count=count if reduction == "mean" else None,
            )
    yield Loss("ctc-mean", mlp(), sequences, lambda m, b: ctc(m, b, "mean"), count=lambda b: len(b["x"]))
    yield Loss("ctc-sum", mlp(), sequences, lambda m, b: ctc(m, b, "sum"))
    yield Loss("ctc-zero_infinity", mlp(), sequences, lambda m, b: ctc(m, b, "mean", zero_infinity=True))
    yield Loss(
        "kl_div-batchmean",
        mlp(),
        rows,
        lambda m, b: F.kl_div(log_probs(m, b), b["probs"], reduction="batchmean"),
        count=lambda b: len(b["x"]),
    )


# Preferences.


def token_log_probs(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each sequence: a masked sum over its tokens."""
    each = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return (each * mask[:, 1:]).sum(-1)


def dpo_two_calls(model: nn.Module, batch: Batch) -> Tensor:
    """DPO with one call for the chosen and one for the rejected."""
    chosen = token_log_probs(model(batch["tokens"]), batch["tokens"], batch["mask"])
    rejected = token_log_probs(model(batch["others"]), batch["others"], batch["mask"])
    reference = batch["reference"][:, 0] - batch["reference"][:, 1]
    return -F.logsigmoid(0.1 * (chosen - rejected - reference)).mean()


def dpo_one_call(model: nn.Module, batch: Batch) -> Tensor:
    """DPO as TRL runs it: chosen and rejected concatenated, one call, split again."""
    tokens = torch.cat([batch["tokens"], batch["others"]])
    log_probs = token_log_probs(model(tokens), tokens, batch["mask"].repeat(2, 1))
    chosen, rejected = log_probs.chunk(2)
    margins = 0.1 * ((chosen - batch["reference"][:, 0]) - (rejected - batch["reference"][:, 1]))
    return (-F.logsigmoid(margins) * 0.9 - F.logsigmoid(-margins) * 0.1).mean()


def rewards_chunk(model: nn.Module, batch: Batch) -> Tensor:
    """A reward model's loss on the halves of one call."""
    chosen, rejected = model(torch.cat([batch["x"], batch["x2"]])).squeeze(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def rewards_of_calls(model: nn.Module, batch: Batch) -> Tensor:
    """One row for the chosen, one for the rejected, of two calls put together."""
    return torch.cat(twice(model, batch)).view(2, -1)


def rewards_viewed(model: nn.Module, batch: Batch) -> Tensor:
    """A reward model's loss on those rows."""
    rewards = rewards_of_calls(model, batch)
    return -F.logsigmoid(rewards[0] - rewards[1]).mean()


def policy_gradient(model: nn.Module, batch: Batch) -> Tensor:
    """The clipped PPO objective, per row."""
    log_prob = log_probs(model, batch).gather(1, batch["label"][:, None]).squeeze(1)
    ratio = (log_prob - batch["probs"].log().gather(1, batch["label"][:, None]).squeeze(1)).exp()
    return -torch.min(ratio * batch["scalar"], ratio.clamp(0.8, 1.2) * batch["scalar"]).mean()


PREFERENCES = [
    Loss("reward-chunk", mlp(1), rows, rewards_chunk),
    Loss("reward-calls-viewed", mlp(1), rows, rewards_viewed, smallest=2),
    Loss("reward-calls-compared", mlp(1), rows, lambda m, b: -rewards_of_calls(m, b).log_softmax(0)[0].mean(), smallest=2),
    Loss("dpo-two-calls", seeded(Tokens), sequences, dpo_two_calls),
    Loss("dpo-one-call", seeded(Tokens), sequences, dpo_one_call),
    Loss("ppo-clipped", mlp(), rows, policy_gradient),
]  # fmt: skip


# Means and sums written by hand, and what may stand between them and the model.


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Squared errors, one per element."""
    return (model(batch["x"]) - batch["value"]) ** 2


def per_sample_dice(model: nn.Module, batch: Batch) -> Tensor:
    """Soft Dice of each sample and class on its own."""
    p = model(batch["x"]).sigmoid()
    overlap = (p * batch["binary"]).sum((2, 3))
    return (1 - (2 * overlap + 1) / (p.sum((2, 3)) + batch["binary"].sum((2, 3)) + 1)).mean()


def masked_mean_per_sequence(model: nn.Module, batch: Batch) -> Tensor:
    """Each sequence's mean over its own tokens, then the mean over sequences."""
    each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["tokens"], reduction="none")
    return ((each * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """The language model's loss, shifted by hand."""
    logits = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(logits.reshape(-1, CLASSES), batch["labels"][:, 1:].reshape(-1))


def masked_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Only the tokens behind a boolean mask."""
    return F.cross_entropy(model(batch["x"])[batch["mask"]], batch["tokens"][batch["mask"]])


def vae(model: nn.Module, batch: Batch) -> Tensor:
    """Reconstruction and divergence, both per sample."""
    mean, log_variance = model(batch["x"]).chunk(2, dim=1)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return (mean - batch["value"][:, :2]).pow(2).sum(1).mean() + divergence.mean()


def vae_of_sums(model: nn.Module, batch: Batch) -> Tensor:
    """The same as torch's own example sums it."""
    mean, log_variance = model(batch["x"]).chunk(2, dim=1)
    error = F.mse_loss(mean, batch["value"][:, :2], reduction="sum")
    return error - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def si_sdr(model: nn.Module, batch: Batch) -> Tensor:
    """Scale-invariant distortion: each estimate's projection on its own target."""
    estimate, target = model(batch["x"]), torch.cat([batch["x2"], batch["value"]], dim=1)
    projected = (estimate * target).sum(1, keepdim=True) * target / target.square().sum(1, keepdim=True)
    return -(projected.square().sum(1) / (estimate - projected).square().sum(1)).log().mean()


class Grid(nn.Module):
    """A small matrix per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, 3, 4)."""
        return self.layer(x).view(-1, 3, 4)


def grid_of(batch: Batch) -> Tensor:
    """A target for each of them."""
    return batch["x2"][:, :, None] * batch["value"][:, None]


def covariance(model: nn.Module, batch: Batch) -> Tensor:
    """A positive definite matrix per sample."""
    out = model(batch["x"])
    return out @ out.mT + torch.eye(3, dtype=torch.float64)


def arc_margin(model: nn.Module, batch: Batch) -> Tensor:
    """ArcFace: each sample's own class further away, written in its place."""
    cosine = model(batch["x"]).tanh()
    rows, margin = torch.arange(len(cosine)), cosine.clone()
    margin[rows, batch["label"]] = (cosine[rows, batch["label"]].acos() + 0.5).cos()
    return F.cross_entropy(8 * margin, batch["label"])


def arc_margin_by_mask(model: nn.Module, batch: Batch) -> Tensor:
    """The same by a mask that has one class per sample."""
    cosine, own = model(batch["x"]).tanh(), F.one_hot(batch["label"] % 3, 3)
    target = cosine[own == 1]
    return F.cross_entropy(8 * (cosine + own * ((target.acos() + 0.4).cos() - target)[:, None]), batch["label"] % 3)


def filled(model: nn.Module, batch: Batch, dim: int) -> Tensor:
    """Outputs step by step, as decoders write them."""
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
    Loss("mean-of-own-label", mlp(), rows, lambda m, b: -log_probs(m, b)[torch.arange(len(b["x"])), b["label"]].mean()),
    Loss("mean-of-lengths", mlp(), sequences, lambda m, b: squares(m, b)[torch.arange(len(b["x"])), b["lengths"] - 1].mean()),
    Loss("mean-of-unfold", mlp(), sequences, lambda m, b: squares(m, b).unfold(1, 2, 1).mean()),
    Loss("mean-of-concatenated-features", mlp(), rows, lambda m, b: torch.cat(twice(m, b), dim=1).pow(2).mean()),
    Loss("mean-of-concatenated-samples", mlp(), rows, lambda m, b: torch.cat(twice(m, b)).pow(2).mean()),
    Loss("mean-of-broadcast-classes", mlp(), rows, lambda m, b: (m(b["x"])[:, :, None] - m(b["x2"])[:, None]).pow(2).mean()),
    Loss("einsum-per-sample", mlp(), rows, lambda m, b: torch.einsum("nd,nd->n", *twice(m, b)).tanh().mean(), smallest=2),
    Loss("bmm-per-sample", mlp(), sequences, lambda m, b: (m(b["x"]) @ m(b["x"]).mT).softmax(-1).pow(2).mean()),
    Loss("instance-normalized", conv(2), images(4, 4), lambda m, b: F.instance_norm(m(b["x"])).exp().mean()),
    Loss("dice-per-sample", conv(2), images(4, 4), per_sample_dice),
    Loss("vae", mlp(), rows, vae),
    Loss("next-token", seeded(Tokens), sequences, next_token, count=lambda b: int((b["labels"][:, 1:] != -100).sum())),
    Loss("next-token-tied", seeded(lambda: Tokens("tied")), sequences, next_token),
    Loss("classes-second", mlp(), sequences, lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"])),
    Loss("masked-tokens", mlp(), sequences, masked_tokens, count=lambda b: int(b["mask"].sum())),
    Loss("masked-select-mean", mlp(), sequences, lambda m, b: squares(m, b).masked_select(b["mask"][..., None]).mean()),
    Loss("masked-mean-per-sequence", mlp(), sequences, masked_mean_per_sequence, count=lambda b: len(b["x"])),
    Loss("sum-halved", mlp(), rows, lambda m, b: -0.5 * squares(m, b).sum()),
    Loss("sum-over-two", mlp(3), rows, lambda m, b: (m(b["x"]) - b["x2"]).square().sum() / 2, smallest=3),
    Loss("sum-times-number", mlp(), rows, lambda m, b: 0.01 * squares(m, b).sum()),
    Loss("sum-over-elements", mlp(3), rows, lambda m, b: (m(b["x"]) - b["x2"]).square().sum() / b["x2"].numel(), count=lambda b: b["x2"].numel(), smallest=2),
    Loss("sum-over-rows", mlp(), rows, lambda m, b: squares(m, b).sum() / len(b["x"]), count=lambda b: len(b["x"])),
    Loss("sum-of-each-over-rows", mlp(), rows, lambda m, b: (squares(m, b) / len(b["x"])).sum(), count=lambda b: len(b["x"])),
    Loss("ce-sum-of-flattened-over-rows", mlp(), sequences, lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["tokens"].flatten(), reduction="sum") / len(b["x"]), count=lambda b: len(b["x"]), smallest=2),
    Loss("stacked-sum-over-two", mlp(), rows, lambda m, b: torch.stack([squares(m, b), m(b["x2"]).square()]).sum() / 2, smallest=3),
    Loss("vae-of-sums", mlp(), rows, vae_of_sums),
    Loss("si-sdr", seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 7))), rows, si_sdr),
    Loss("mean-of-a-mean", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]).mean()),
    Loss("distances-within-samples", seeded(Grid), rows, lambda m, b: torch.cdist(m(b["x"]), m(b["x"]).sin()).mean(), smallest=2),
    Loss("distances-to-own-targets", seeded(Grid), rows, lambda m, b: torch.cdist(m(b["x"]), grid_of(b)).amin(1).mean(), smallest=2),
    Loss("product-with-own-targets", seeded(Grid), rows, lambda m, b: (m(b["x"]) @ grid_of(b).mT).tanh().mean(), smallest=2),
    Loss("einsum-with-targets", mlp(), rows, lambda m, b: torch.einsum("bi,bi->b", m(b["x"]), b["value"]).tanh().mean(), smallest=2),
    Loss("spectrogram", seeded(Grid), rows, lambda m, b: torch.stft(m(b["x"]).flatten(1), 8, window=torch.ones(8).double(), return_complex=True).abs().mean(), smallest=2),
    Loss("multivariate-normal", seeded(Grid), rows, lambda m, b: -torch.distributions.MultivariateNormal(m(b["x"])[:, 0, :3], covariance(m, b)).log_prob(b["x2"]).mean(), smallest=2),
    Loss("put-back-by-a-mask", mlp(), rows, lambda m, b: (lambda out, mask: torch.zeros_like(out).index_put((mask,), out[mask] * 2).square().mean())(m(b["x"])[:, 0], b["scalar"] > -9)),
    Loss("arc-margin-by-index", mlp(), rows, arc_margin),
    Loss("arc-margin-by-mask", mlp(3), rows, arc_margin_by_mask, smallest=4),
    Loss("filled-step-by-step", mlp(), sequences, lambda m, b: F.cross_entropy(filled(m, b, 0).permute(1, 2, 0), b["labels"])),
    Loss("multiple-choice", mlp(1), rows, lambda m, b: F.cross_entropy(m(torch.stack([b["x"], b["x2"], b["x3"]], 1).flatten(0, 1)).view(-1, 3), b["label"] % 3), smallest=2),
]  # fmt: skip


# Terms: their factors and their sums.


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of terms by Python's own `sum`, which starts at 0."""
    result = sum(terms)
    assert isinstance(result, Tensor)
    return result


def two_heads(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """A cross-entropy and a squared error, both over the same samples."""
    out = model(batch["x"])
    return F.cross_entropy(out, batch["label"]), F.mse_loss(out, batch["value"])


def weighed(model: nn.Module, batch: Batch) -> Tensor:
    """A stack of terms times a tensor of their weights."""
    return (torch.stack(two_heads(model, batch)) * torch.tensor([0.3, 0.7], dtype=torch.float64)).sum()


def uncertainty(model: Any, batch: Batch) -> Tensor:
    """Kendall's learned weights: exp(-s) · term + s for each term."""
    ce, mse = two_heads(model, batch)
    return (-model.s).exp() * ce + model.s + 0.5 * (-model.t).exp() * mse + 0.5 * model.t


SUMS_OF_TERMS = [
    Loss("two-terms", mlp(), rows, lambda m, b: total(two_heads(m, b))),
    Loss("factor", mlp(), rows, lambda m, b: 0.3 * squares(m, b).mean()),
    Loss("factor-tensor", mlp(), rows, lambda m, b: squares(m, b).mean() * torch.tensor(0.3, dtype=torch.float64)),
    Loss("subtracted", mlp(), rows, lambda m, b: two_heads(m, b)[1] - 0.2 * two_heads(m, b)[0]),
    Loss("add-alpha", mlp(), rows, lambda m, b: torch.add(*two_heads(m, b), alpha=0.4)),
    Loss("factors-nested", mlp(), rows, lambda m, b: -0.5 * ((two_heads(m, b)[0] / 2 - 3 * two_heads(m, b)[1]) * 0.1)),
    Loss("steps-unrolled", mlp(), sequences, lambda m, b: total([F.cross_entropy(m(b["x"][:, t]), b["tokens"][:, t]) for t in range(STEPS)]) / STEPS),
    Loss("stack-mean", mlp(), rows, lambda m, b: torch.stack(two_heads(m, b)).mean()),
    Loss("stack-weighed", mlp(), rows, weighed),
    Loss("cat-sum", mlp(), rows, lambda m, b: torch.cat([t.view(1) for t in two_heads(m, b)]).sum()),
    Loss("uncertainty-one-term", seeded(Tempered), rows, lambda m, b: (-m.s).exp() * squares(m, b).mean() + m.s),
    Loss("uncertainty-two-terms", seeded(Tempered), rows, uncertainty),
    Loss("learned-weight", seeded(Tempered), rows, lambda m, b: F.softplus(m.s) * two_heads(m, b)[0] / (1 + m.t**2)),
]  # fmt: skip


# Regularisers: parameters alone, counted once per window.


def l1(model: nn.Module) -> Tensor:
    """Sum of absolute values over all parameters."""
    return sum((p.abs().sum() for p in model.parameters()), torch.zeros((), dtype=torch.float64))


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

    def added(main: Function, term: Callable[[nn.Module], Tensor]) -> Function:
        return lambda m, b: main(m, b) + term(m)

    for (kind, main), (name, term) in itertools.product(data.items(), REGULARISERS.items()):
        yield Loss(f"{kind}+{name}", mlp(), rows, added(main, term), told=kind != "sum")
    yield Loss("term-first", mlp(), rows, lambda m, b: l2(m) + squares(m, b).mean())
    yield Loss("term-subtracted", mlp(), rows, lambda m, b: squares(m, b).mean() - 0.7 * next(m.parameters()).norm())


# Models whose last operations stand in the graph's tail.


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """WGAN-GP: the critic's slope at each sample, kept near 1."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).pow(2).mean()


def r1(model: nn.Module, batch: Batch) -> Tensor:
    """A loss and the squared slope at each sample."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.softplus(-out).mean() + 5 * slope.pow(2).sum(1).mean()


def lora() -> nn.Module:
    """A frozen body and head around one trained low-rank layer."""
    body = nn.Sequential(
        nn.Linear(3, 6),
        nn.Linear(6, 2, bias=False),
        nn.Linear(2, 6, bias=False),
        nn.LayerNorm(6),
        nn.GELU(),
        nn.Dropout(0.0),
        nn.Linear(6, CLASSES),
    )
    for index in (0, 3, 6):
        body[index].requires_grad_(requires_grad=False)
    return body


def headed(head: nn.Module) -> nn.Module:
    """A body and a head whose weight is computed from its parameters."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), head)


class Computed(nn.Module):
    """A head whose weight is a function of its parameter."""

    def __init__(self, weight: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(3, 5), weight
        self.w = nn.Parameter(torch.randn(CLASSES, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return F.linear(self.body(x).tanh(), self.weight(self.w))


class Merged(nn.Module):
    """A trained weight and its low-rank adapter, merged at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, CLASSES)
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return F.linear(self.body(x).tanh(), self.head.weight + 0.5 * self.b @ self.a, self.head.bias)


class Adapted(Merged):
    """The same with a frozen base, and with DoRA's learned size of each row."""

    def __init__(self, *, sized: bool) -> None:
        super().__init__()
        self.head.requires_grad_(requires_grad=False)
        self.size, self.sized = nn.Parameter(torch.ones(CLASSES)), sized

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        weight = self.head.weight + 0.5 * self.b @ self.a
        if self.sized:
            weight = self.size[:, None] * weight / weight.norm(dim=1, keepdim=True)
        return F.linear(self.body(x).tanh(), weight, self.head.bias)


class Sign(torch.autograd.Function):
    """Weights of ±1 with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Their signs."""
        del ctx
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """As if nothing had been done."""
        del ctx
        return gradients[0]


HEADS: dict[str, Callable[[], nn.Module]] = {
    "spectral-norm": lambda: headed(spectral_norm(nn.Linear(5, CLASSES)).eval()),
    "old-spectral-norm": lambda: headed(old_spectral_norm(nn.Linear(5, CLASSES)).eval()),
    "orthogonal-householder": lambda: headed(orthogonal(nn.Linear(5, CLASSES), orthogonal_map="householder")),
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
        """How much each user likes a thing."""
        return (self.users[user] * self.things[thing]).sum(1) + self.bias[thing]


def bpr(model: nn.Module, batch: Batch) -> Tensor:
    """Bayesian personalized ranking, each term per sample."""
    better, worse = model(batch["label"], batch["many"][:, 0]), model(batch["label"], batch["many"][:, 1])
    return -F.logsigmoid(better - worse)


MODELS = [
    Loss("line", seeded(Line), rows, lambda m, b: ((m.w * b["x"] + m.b - b["x2"]) ** 2).mean(), count=lambda b: b["x"].numel()),
    Loss("lstm", seeded(lambda: Recurrent(nn.LSTM, batch_first=True)), sequences, lambda m, b: squares(m, b).mean()),
    Loss("lstm-time-major", seeded(lambda: Recurrent(nn.LSTM, batch_first=False)), sequences, lambda m, b: F.mse_loss(m(b["x"].transpose(0, 1)).transpose(0, 1), b["value"])),
    Loss("attention", seeded(Attention), sequences, lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"])),
    Loss("conv", conv(2), images(4, 4), lambda m, b: F.mse_loss(m(b["x"]), b["value"]), count=lambda b: b["value"].numel()),
    Loss("frozen-batch-norm", seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval())), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"])),
    Loss("lora", seeded(lora), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])),
    Loss("frozen-head", seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4).requires_grad_(requires_grad=False))), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])),
    *(
        Loss(f"{name}-head", seeded(make), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]))
        for name, make in HEADS.items()
    ),
    Loss("merged-lora-head", seeded(Merged), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"])),
    Loss("distances-to-computed", seeded(lambda: Computed(torch.tanh)), rows, lambda m, b: torch.cdist(m.body(b["x"]), m.w.tanh()).amin(1).mean()),
    Loss("factors", seeded(Factors), rows, lambda m, b: (m(b["label"], b["many"][:, 0]) - b["scalar"]).square().mean(), count=lambda b: len(b["x"])),
    Loss("factors-selected", seeded(Factors), rows, lambda m, b: (m.users.index_select(0, b["label"]) * m.things.index_select(0, b["many"][:, 0])).sum(1).square().mean()),
    Loss("factors-decayed-by-hand", seeded(Factors), rows, lambda m, b: bpr(m, b).sum() / len(b["x"]) + 0.1 * m.users[b["label"]].square().sum() / len(b["x"])),
    Loss("bpr", seeded(Factors), rows, lambda m, b: bpr(m, b).mean(), count=lambda b: len(b["x"])),
    Loss("gradient-penalty", mlp(1), rows, gradient_penalty),
    Loss("gradient-penalty-r1", mlp(1), rows, r1),
]  # fmt: skip


HALVES = [  # of sums: the sizes may be those of features, and either divisor may be the count
    Loss("half-mse-sum-over-len", mlp(1), rows, lambda m, b: F.mse_loss(m(b["x"])[:, 0], b["scalar"], reduction="sum") / len(b["x"]) / 2),
    Loss("half-ce-sum-over-len", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"], reduction="sum") / len(b["x"]) / 2),
    Loss("dot-over-len", mlp(1), rows, lambda m, b: torch.dot(m(b["x"])[:, 0], b["scalar"]) / len(b["x"])),
    Loss("heads-of-a-stack", mlp(), rows, lambda m, b: torch.stack([F.cross_entropy(p, b["label"]) for p in torch.stack([m(b["x"]), m(b["x2"])])]).sum()),
]  # fmt: skip

READABLE: list[Loss] = [
    *HALVES,
    *cross_entropies(),
    *torch_losses(),
    *PREFERENCES,
    *TAILS,
    *SUMS_OF_TERMS,
    *regularised(),
    *MODELS,
]


# Terms whose counts are in no constant ratio: their totals must be known in advance.


def kept(batch: Batch) -> int:
    """Targets that are not ignored."""
    return int((batch["labels"] != -100).sum())


def masked_and_mean(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over the tokens that count, and one over all of them."""
    out = model(batch["x"])
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten()) + 0.3 * F.mse_loss(out, batch["value"])


def two_maskings(model: nn.Module, batch: Batch) -> Tensor:
    """Two cross-entropies, each with targets of its own."""
    out = model(batch["x"])
    return F.cross_entropy(out, batch["partly"]) - 0.2 * F.cross_entropy(-out, batch["label"], ignore_index=0)


SEVERAL = [
    Loss("masked+mean", mlp(), sequences, masked_and_mean, counts=lambda b: (kept(b), b["value"].numel())),
    Loss("masked+mean+once", mlp(), sequences, lambda m, b: masked_and_mean(m, b) + 0.1 * l2(m), counts=lambda b: (kept(b), b["value"].numel())),
    Loss("two-maskings", mlp(), rows, two_maskings, counts=lambda b: (int((b["partly"] != -100).sum()), int((b["label"] != 0).sum()))),
    Loss(
        "weighted+mean",
        mlp(),
        rows,
        lambda m, b: F.cross_entropy(m(b["x"]), b["label"], weight=WEIGHT) + m(b["x"]).pow(2).mean(),
        counts=lambda b: (float(WEIGHT[b["label"]].sum()), b["value"].numel()),
    ),
    Loss(
        "masked-selection+per-sequence",
        mlp(),
        sequences,
        lambda m, b: squares(m, b)[b["mask"]].mean() + masked_mean_per_sequence(m, b),
        counts=lambda b: (CLASSES * int(b["mask"].sum()), len(b["x"])),
    ),
    Loss("stacked", mlp(), sequences, lambda m, b: torch.stack([masked_tokens(m, b), squares(m, b).mean()]).mean(), counts=lambda b: (int(b["mask"].sum()), b["value"].numel())),
]  # fmt: skip


# Losses that tempt a reader to guess: exact or refused, never close.


def one_by_one(model: nn.Module, batch: Batch) -> list[Tensor]:
    """A loss per sample, in a list."""
    return [F.mse_loss(model(x), y) for x, y in zip(batch["x"], batch["value"], strict=True)]


def interleaved(model: nn.Module, batch: Batch) -> Tensor:
    """Chosen and rejected in turns."""
    rewards = model(torch.stack([batch["x"], batch["x2"]], dim=1).flatten(0, 1))
    return -F.logsigmoid(rewards[0::2] - rewards[1::2]).mean()


EITHER = [
    Loss("centres", seeded(Line), rows, lambda m, b: torch.cdist(b["x"], m.w.view(3, 1) * torch.eye(3).double()).min(1).values.mean()),
    Loss("list-stack-mean", mlp(), rows, lambda m, b: torch.stack(one_by_one(m, b)).mean()),
    Loss("list-sum", mlp(), rows, lambda m, b: sum(one_by_one(m, b), torch.zeros(()).double())),
    Loss("list-cat-mean", mlp(), rows, lambda m, b: torch.cat([squares(m, {"x": x[None], "value": v[None]}) for x, v in zip(b["x"], b["value"], strict=True)]).mean()),
    Loss("mean-times-size", mlp(), rows, lambda m, b: squares(m, b).mean() * len(b["x"])),
    Loss("mean-over-size-tensor", mlp(), rows, lambda m, b: squares(m, b).mean() / b["probs"].sum()),
    Loss("sum-over-size", mlp(), rows, lambda m, b: squares(m, b).sum() / len(b["x"])),
    Loss("sum-over-numel", mlp(), rows, lambda m, b: squares(m, b).sum() / b["value"].numel()),
    Loss("sum-over-four", mlp(), rows, lambda m, b: squares(m, b).sum() / 4),
    Loss("sum-over-one", mlp(), rows, lambda m, b: squares(m, b).sum() / 1),
    Loss("sum-of-divided-by-size", mlp(), rows, lambda m, b: (squares(m, b) / len(b["x"])).sum()),
    Loss("sum-of-divided-by-mask", mlp(), sequences, lambda m, b: (squares(m, b) * b["mask"][..., None] / b["mask"].sum()).sum()),
    Loss("mean-over-samples-sum-of-features", mlp(), rows, lambda m, b: squares(m, b).mean(0).sum()),
    Loss("sum-over-samples-weighed", mlp(), rows, lambda m, b: (squares(m, b).sum(0) * WEIGHT).sum()),
    Loss("sum-and-mean", mlp(), rows, lambda m, b: squares(m, b).sum() + m(b["x"]).abs().mean(), told=False),
    Loss("interleaved-pairs", mlp(1), rows, interleaved),
    Loss("time-major-last", seeded(lambda: Recurrent(nn.GRU, batch_first=False)), sequences, lambda m, b: m(b["x"].transpose(0, 1))[-1].pow(2).mean()),
    Loss("last-hidden-state", seeded(lambda: nn.LSTM(3, CLASSES, batch_first=True)), sequences, lambda m, b: m(b["x"])[1][0][-1].pow(2).mean()),
    Loss("first-sample-only", mlp(), rows, lambda m, b: m(b["x"])[0].pow(2).mean()),
    Loss("masked-mean-by-hand", mlp(), sequences, lambda m, b: (squares(m, b).mean(-1) * b["mask"]).sum() / b["mask"].sum()),
]  # fmt: skip

# With micro-batches all of one size these are, node for node, other losses that must be read: a size cannot be told from a
# constant factor, a list of samples from a list of terms. Only uneven micro-batches show what they are.
AMBIGUOUS_WHEN_EVEN = {
    "list-sum",
    "mean-times-size",
    "mean-over-size-tensor",
    "sum-over-one",
    "sum-over-four",
    "first-sample-only",
}


SPLIT = (4, 4, 2, 1)  # the micro-batches that every row is tried with


def sizes(case: Loss) -> tuple[int, ...]:
    """The split that a row is tried with."""
    return tuple(max(size, case.smallest) for size in SPLIT)

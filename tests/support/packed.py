"""Sequences of any length in one padded batch, a model that reads them, and losses over their tokens."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.samples import CLASSES, Batch, generator, seeded


class Attentive(nn.Module):
    """A small transformer: embeddings of tokens and places, attention within a mask, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, 8), nn.Embedding(64, 8)
        self.qkv, self.mix = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(n, width) → (n, width, 4); what is masked is seen by nobody."""
        width, where = tokens.shape[1], tokens.device
        places = torch.arange(width, device=where) if position_ids is None else position_ids
        x = self.tokens(tokens) + self.places(places)
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = mask.bool()[:, None, :] & torch.ones(width, width, dtype=torch.bool, device=where).tril()
        scores = (q @ k.mT).masked_fill(~seen, -1e30)  # a row without any place would be NaN
        return self.head(self.norm(x + self.mix(scores.softmax(-1) @ v)))


attentive = seeded(Attentive)


def text(lengths: Sequence[int], seed: int = 0, extra: int = 0) -> Batch:
    """Right-padded sequences, as wide as the longest, or wider."""
    by = generator(seed)
    n, width = len(lengths), max(*lengths, 1) + extra
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(CLASSES, (n, width), generator=by).masked_fill(~mask, 0)
    labels = torch.randint(CLASSES, (n, width), generator=by).masked_fill(~mask, -100)
    return {
        "tokens": tokens,
        "attention_mask": mask.long(),
        "labels": labels,
        "position_ids": torch.arange(width).repeat(n, 1),
        "lengths": torch.tensor(lengths),
        "weight": torch.rand(n, generator=by, dtype=torch.float64),
    }


def token_loss(model: Any, batch: Batch) -> Tensor:
    """A cross-entropy over the tokens that are not ignored."""
    logits = model(batch["tokens"], batch["attention_mask"], batch["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def sequence_loss(model: Any, batch: Batch) -> Tensor:
    """Each sequence's mean over its own tokens, then over sequences."""
    logits = model(batch["tokens"], batch["attention_mask"])
    each = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (each.sum(1) / batch["lengths"].clamp(min=1)).mean()


def two_losses(model: Any, batch: Batch) -> Tensor:
    """Both, with counts of their own."""
    return token_loss(model, batch) + 0.5 * sequence_loss(model, batch)


LOSSES = {"tokens": token_loss, "sequences": sequence_loss, "both": two_losses}
LENGTHS: dict[str, Any] = {
    "mask": "attention_mask",
    "tensor": lambda batch: batch["lengths"],
    "list": lambda batch: batch["attention_mask"].sum(1).tolist(),
    "larger": lambda batch: batch["lengths"] + 1,
}

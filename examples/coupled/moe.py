"""A mixture of experts whose load is balanced over the tokens of the whole batch (Fedus et al. 2021).

The balancing loss is computed inside the model, where micro-batches then meet.

python -m examples.coupled.moe
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across

EXPERTS = 4


class MixtureOfExperts(nn.Module):
    """Each token goes through the expert that the router likes best."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(EXPERTS)
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (samples, length, width), and how unevenly the experts were used for those not masked."""
        likes = self.router(tokens).softmax(-1)
        chosen = F.one_hot(likes.argmax(-1), EXPERTS).to(likes.dtype)
        outputs = torch.stack([expert(tokens) for expert in self.experts], -1)  # a small example: all of them
        number = mask.sum()
        routed = across.mean(chosen[mask].mean(0), count=number)  # the share of tokens that each expert gets
        liked = across.mean(likes[mask].mean(0), count=number)
        return (outputs * (chosen * likes)[..., None, :]).sum(-1), EXPERTS * (routed * liked).sum()


class Classifier(nn.Module):
    """A mixture of experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(6, 16), MixtureOfExperts(16), nn.Linear(16, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of the classes, and the balancing loss."""
        hidden = self.first(tokens)
        mixed, balance = self.mixture(hidden, mask)
        pooled = ((hidden + mixed) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.last(pooled), balance


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The balance is the same in every micro-batch, so it counts once; the rest is a mean over samples."""
    scores, balance = model(batch["tokens"], batch["mask"])
    return F.cross_entropy(scores, batch["labels"]) + 0.01 * across.once(balance)


def network() -> nn.Module:
    """A small classifier of sequences."""
    return Classifier()


def samples(number: int) -> dict[str, Tensor]:
    """Sequences of one to five tokens, padded behind a mask."""
    labels = torch.randint(3, (number,))
    mask = torch.arange(5) < torch.randint(1, 6, (number, 1))
    tokens = torch.randn(number, 5, 6) + F.one_hot(labels, 6)[:, None]
    return {"tokens": tokens * mask[..., None], "mask": mask, "labels": labels}


def main() -> None:
    """Train on batches of 100 sequences, 16 at a time."""
    torch.manual_seed(0)
    model = network()
    step = BigStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, micro_batch_size=16)
    for _ in range(5):
        update = step(samples(100))
        print(f"loss {update.loss:.4f} of 100 sequences in {update.micro_batches} micro-batches")


if __name__ == "__main__":
    main()

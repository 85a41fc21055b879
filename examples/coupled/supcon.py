"""Supervised contrastive loss (Khosla et al. 2020): two views of each sample, attracted by all views of its class.

python -m examples.coupled.supcon
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across

TEMPERATURE = 0.1
VIEWS = 2


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A row of similarities per view of this micro-batch, against all views of the batch."""
    views, labels = batch  # (samples, 2, features), (samples,)
    mine = F.normalize(model(views.flatten(0, 1)), dim=1)
    labels = labels.repeat_interleave(VIEWS)
    every, every_label = across.gather(mine), across.gather(labels)
    place = VIEWS * across.offset() + torch.arange(len(mine), device=mine.device)  # where my rows are among all
    itself = place[:, None] == torch.arange(len(every), device=mine.device)
    positive = (labels[:, None] == every_label) & ~itself
    log_likely = (mine @ every.T / TEMPERATURE).masked_fill(itself, -torch.inf).log_softmax(1)
    attracted = log_likely.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)
    return -attracted.mean()


def network() -> nn.Module:
    """An encoder with its projection."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Two noisy views of each sample, of four classes."""
    labels = torch.randint(4, (number,))
    plain = torch.randn(number, 1, 16) + 2.0 * F.one_hot(labels, 16)[:, None]
    return plain + 0.3 * torch.randn(number, VIEWS, 16), labels


def main() -> None:
    """Train on batches of 100 samples, 16 at a time."""
    torch.manual_seed(0)
    model = network()
    step = BigStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, micro_batch_size=16)
    for _ in range(5):
        update = step(samples(100))
        print(f"loss {update.loss:.4f} of {update.count:.0f} views in {update.micro_batches} micro-batches")


if __name__ == "__main__":
    main()

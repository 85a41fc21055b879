"""Barlow Twins (Zbontar et al. 2021): the cross-correlation of two views' features over the batch should be 1.

python -m examples.coupled.barlow_twins
"""

import torch
from torch import Tensor, nn

from bigbatch import BigStep, across

OFF_DIAGONAL = 0.005


def standardised(features: Tensor) -> Tensor:
    """Features of mean 0 and variance 1 over the batch."""
    centred = features - across.mean(features.mean(0))
    variance = across.mean(centred.square().mean(0))
    return centred / (variance + 1e-5).sqrt()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over this micro-batch becomes one over the batch by `across.mean`; what is made of those counts once."""
    one, two = (standardised(model(view)) for view in batch)
    correlation = across.mean(one.T @ two / len(one))  # (features, features)
    diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return across.once((diagonal - 1).square().sum() + OFF_DIAGONAL * off_diagonal)


def network() -> nn.Module:
    """An encoder with its projection."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Two views of each sample, which have half of their features in common."""
    common = torch.randn(number, 8)
    return torch.cat([common, torch.randn(number, 8)], 1), torch.cat([common, torch.randn(number, 8)], 1)


def main() -> None:
    """Train on batches of 100 samples, 16 at a time."""
    torch.manual_seed(0)
    model = network()
    step = BigStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, micro_batch_size=16)
    for _ in range(5):
        update = step(samples(100))
        print(f"loss {update.loss:.4f} of 100 samples in {update.micro_batches} micro-batches")


if __name__ == "__main__":
    main()

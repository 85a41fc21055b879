"""A correlation loss: 1 less Pearson's correlation of predictions and targets over the batch.

python -m examples.coupled.correlation
"""

import torch
from torch import Tensor, nn

from bigbatch import BigStep, across


def centred(values: Tensor) -> Tensor:
    """Values less their mean over the batch."""
    return values - across.mean(values.mean())


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over this micro-batch becomes one over the batch by `across.mean`; what is made of those counts once."""
    inputs, targets = batch
    found, true = centred(model(inputs).squeeze(1)), centred(targets)
    covariance = across.mean((found * true).mean())
    variances = across.mean(found.square().mean()) * across.mean(true.square().mean())
    return across.once(1 - covariance / variances.sqrt())


def network() -> nn.Module:
    """A small regression."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Targets that depend on the inputs, and on chance."""
    inputs = torch.randn(number, 8)
    return inputs, inputs[:, :3].sum(1).sin() + 0.3 * torch.randn(number)


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

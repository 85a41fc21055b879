"""RMSE: the root of the mean squared error of the batch, which is not the mean of the micro-batches' roots.

python -m examples.coupled.rmse
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean is the batch's; its root is the same in every micro-batch, and counts once."""
    inputs, targets = batch
    return across.once(across.mean(F.mse_loss(model(inputs), targets)).sqrt())


def network() -> nn.Module:
    """A small regression."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Targets that depend on the inputs, and on chance."""
    inputs = torch.randn(number, 8)
    return inputs, inputs[:, :2] + 0.3 * torch.randn(number, 2)


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

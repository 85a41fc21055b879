"""VICReg (Bardes et al. 2022): views alike, features of some variance over the batch and without covariance.

python -m examples.coupled.vicreg
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across


def covariance(features: Tensor) -> Tensor:
    """The covariance of features over the batch: (features, features)."""
    number = across.sum(torch.tensor(len(features)))  # of samples in the whole batch
    centred = features - across.mean(features.mean(0))
    return across.sum(centred.T @ centred) / (number - 1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The invariance is a mean over samples as any other; variance and covariance are the batch's, and count once."""
    one, two = (model(view) for view in batch)
    invariance = F.mse_loss(one, two)
    spread, redundancy = torch.zeros_like(invariance), torch.zeros_like(invariance)
    for matrix in (covariance(one), covariance(two)):
        variances = matrix.diagonal()
        spread = spread + F.relu(1 - (variances + 1e-4).sqrt()).mean() / 2
        redundancy = redundancy + (matrix.square().sum() - variances.square().sum()) / len(matrix)
    return 25 * invariance + across.once(25 * spread + redundancy)


def network() -> nn.Module:
    """An encoder with its projection."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Two noisy views of each sample."""
    plain = torch.randn(number, 16)
    return plain + 0.3 * torch.randn(number, 16), plain + 0.3 * torch.randn(number, 16)


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

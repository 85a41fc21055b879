"""Soft Dice: how far segments overlap with the truth, by class, over all pixels of the batch.

python -m examples.coupled.dice
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across

CLASSES = 3


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A ratio of sums: the sums are the batch's, and what is made of them counts once."""
    images, labels = batch
    found = model(images).softmax(1)  # (samples, classes, height, width)
    true = F.one_hot(labels, CLASSES).movedim(-1, 1)
    overlap = across.sum((found * true).sum((0, 2, 3)))
    total = across.sum((found + true).sum((0, 2, 3)))
    return across.once(1 - ((2 * overlap + 1) / (total + 1)).mean())


def network() -> nn.Module:
    """Two convolutions."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, CLASSES, 1))


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Images as bright as their classes."""
    labels = torch.randint(CLASSES, (number, 6, 6))
    return (labels + 0.3 * torch.randn(number, 6, 6))[:, None], labels


def main() -> None:
    """Train on batches of 100 images, 16 at a time."""
    torch.manual_seed(0)
    model = network()
    step = BigStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, micro_batch_size=16)
    for _ in range(5):
        update = step(samples(100))
        print(f"loss {update.loss:.4f} of 100 images in {update.micro_batches} micro-batches")


if __name__ == "__main__":
    main()

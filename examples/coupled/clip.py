"""CLIP with a learned temperature: which text belongs to an image, and which image to a text, of all in the batch.

python -m examples.coupled.clip
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across


class TwoTowers(nn.Module):
    """Images and texts, embedded in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.texts = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embed both; returns the temperature's inverse, too."""
        return F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1), self.log_scale.exp()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A row of similarities per sample of this micro-batch, against all samples of the batch."""
    images, texts, scale = model(*batch)
    pair = across.offset() + torch.arange(len(images), device=images.device)  # where my own rows are among all
    by_image = F.cross_entropy(scale * images @ across.gather(texts).T, pair)
    by_text = F.cross_entropy(scale * texts @ across.gather(images).T, pair)
    return (by_image + by_text) / 2


def network() -> nn.Module:
    """Two small towers."""
    return TwoTowers()


def samples(number: int) -> tuple[Tensor, Tensor]:
    """Pairs that have something in common."""
    common = torch.randn(number, 4)
    return torch.cat([common, torch.randn(number, 12)], 1), torch.cat([torch.randn(number, 8), common], 1)


def main() -> None:
    """Train on batches of 100 pairs, 16 at a time."""
    torch.manual_seed(0)
    model = network()
    step = BigStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, micro_batch_size=16)
    for _ in range(5):
        update = step(samples(100))
        print(f"loss {update.loss:.4f} of {update.count:.0f} pairs in {update.micro_batches} micro-batches")


if __name__ == "__main__":
    main()

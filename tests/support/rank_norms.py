"""Models and losses whose samples are coupled."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import across
from tests.support.rank_loops import CLASSES

Batch = tuple[Tensor, Tensor]


class Normalised(nn.Module):
    """BatchNorm between two layers, used twice, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, classes)."""
        found: Tensor = self.two(torch.tanh(self.norm(self.one(x))) + self.norm(self.one(-x)))
        return found


class Plain(Normalised):
    """Without it."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, classes)."""
        found: Tensor = self.two(torch.tanh(self.one(x)))
        return found


def made(kind: type[Normalised]) -> Normalised:
    """Return the same model everywhere."""
    torch.manual_seed(0)
    return kind().double()


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    """A mean over samples that have a target."""
    return F.cross_entropy(model(batch[0]), batch[1])


def contrastive(model: Any, batch: Batch) -> Tensor:
    """Every sample against all others, by a learned temperature."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    mine, other = F.normalize(model(batch[0])), F.normalize(model(batch[0].flip(1)))
    pair = across.offset() + torch.arange(len(mine))
    return F.cross_entropy(inner.log_scale.exp() * mine @ across.gather(other).T, pair)


def root(model: Any, batch: Batch) -> Tensor:
    """Of a mean over all samples."""
    return across.once(across.mean(model(batch[0]).pow(2).mean()).sqrt())


def spread(model: Any, batch: Batch) -> Tensor:
    """A mean over samples of what depends on the mean of all."""
    out = model(batch[0])
    return (out - across.mean(out.mean(0))).pow(2).mean()


CASES: dict[str, tuple[type[Normalised], Callable[[Any, Batch], Tensor]]] = {
    "batch norm": (Normalised, cross_entropy),
    "contrastive": (Plain, contrastive),
    "contrastive with batch norm": (Normalised, contrastive),
    "root": (Plain, root),
    "spread": (Plain, spread),
}

"""Models that make a table when they need it, as the angles of rotary embeddings, and texts of uneven length."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.samples import Batch

SHORT = [16] * 4 + [8] * 8 + [5]
LONG = [32] * 2 + SHORT


def text(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Right-padded sequences of one token each: their shape tells how many there are."""
    by, width = torch.Generator().manual_seed(seed), max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(5, (len(lengths), width), generator=by).masked_fill(~mask, 0)
    return {"tokens": tokens, "mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def token_loss(model: Any, batch: Batch) -> Tensor:
    """A cross-entropy over tokens."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Turning(nn.Module):
    """Embeddings times a table of the places, which is made when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, width) → (n, width, 5)."""
        return self.head(self.tokens(tokens) * self.table(tokens.shape[1])[: tokens.shape[1]])

    def table(self, width: int) -> Tensor:
        """Return a table that is wide enough."""
        return self.made(width)

    def made(self, width: int, over: float = 1.0) -> Tensor:
        """Make a table of so many places."""
        places = torch.arange(width, dtype=torch.float64, device=self.head.weight.device)
        return torch.cos(places / over)[:, None]


class AsAttribute(Turning):
    """A plain attribute that grows with the longest batch so far."""

    kept: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.keep()

    def keep(self) -> None:
        """Begin with none."""
        self.kept = None

    def table(self, width: int) -> Tensor:
        """Make a longer one where this is too short."""
        if self.kept is None or width > len(self.kept):
            self.kept = self.made(width, width)  # all of it is another
        return self.kept


class AsBuffer(AsAttribute):
    """A registered buffer."""

    def keep(self) -> None:
        """Begin with a short one."""
        self.register_buffer("kept", self.made(2), persistent=False)


class InATuple(Turning):
    """Cosines and sines together."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[int, Tensor] = (2, self.made(2))

    def table(self, width: int) -> Tensor:
        """Make a longer one where this is too short."""
        if width > self.kept[0]:
            self.kept = width, self.made(width, width)
        return self.kept[1]


class PutAside(Turning):
    """An activation is kept for whoever wants to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Keep it."""
        self.latest = super().forward(tokens)
        return self.latest


class OfTheLatestWidth(Turning):
    """A table that is made anew whenever the width is another, as ESM has it."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.kept = 0, self.made(2)

    def table(self, width: int) -> Tensor:
        """Make another for another width."""
        if width != self.width:
            self.width, self.kept = width, self.made(width)
        return self.kept


class ByWidth(Turning):
    """A dict of tables, the latest of which was made when there was none for its width."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def table(self, width: int) -> Tensor:
        """Make one where there is none, and keep two."""
        if width not in self.kept:
            self.kept[width] = self.made(width)
        while len(self.kept) > 2:
            del self.kept[next(iter(self.kept))]
        return self.kept[width]

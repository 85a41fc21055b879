# ruff: noqa: D102
# fmt: off
"""Batches for the zoo: plain rows, pictures, sentences and graphs."""

from typing import Any

import torch
from torch import Tensor, nn

WORDS, WIDTH, CLASSES = 19, 7, 3


class Drawn:
    """Draws for so many samples, of a seed."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.by = n, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:  # standard normal numbers
        return torch.randn(self.n, *shape, generator=self.by, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:  # numbers below 1
        return torch.rand(self.n, *shape, generator=self.by, dtype=torch.float64)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:  # whole numbers below `high`
        return torch.randint(low, high, (self.n, *shape), generator=self.by)


def rows(n: int, seed: int) -> dict[str, Tensor]:
    """A bit of everything that losses of torch ask for; one row, sequence or picture per sample."""
    by = Drawn(n, seed)
    lengths, label, rare = by.integers(WIDTH, low=2), by.integers(CLASSES), by.uniform() < 0.1
    mask = torch.arange(WIDTH) < lengths[:, None]
    tokens = by.integers(WORDS, WIDTH, low=1) * mask
    rare[n // 2] = True  # some micro-batches have none, a whole batch always one
    return {
        "x": by.normal(6), "x2": by.normal(6), "x3": by.normal(6), "value": by.normal(CLASSES), "noise": by.normal(2),
        "label": label, "partly": label.masked_fill(by.uniform() < 0.3, -100), "rare": rare,
        "binary": by.integers(2).double(), "weight": 0.5 + by.uniform(), "advantage": by.normal(),
        "user": by.integers(9), "item": by.integers(9), "other": by.integers(9),
        "sequence": by.normal(WIDTH, 6), "values": by.normal(WIDTH, CLASSES), "classes": by.integers(CLASSES, WIDTH),
        "tokens": tokens, "labels": tokens.masked_fill(~mask, -100), "mask": mask.double(), "lengths": lengths,
        "spelled": by.integers(CLASSES, 2, low=1), "spelled_lengths": by.integers(3, low=1),
        "image": by.normal(3, 16, 16), "small": by.normal(2, 8, 8), "shape": by.integers(2, 1, 8, 8).double(),
        "wave": by.normal(64), "clean": by.normal(64),
    }


def sentences(n: int, seed: int) -> dict[str, Tensor]:
    """Padded sentences with labels of every kind, as tokenizers and collators make them."""
    by = Drawn(n, seed)
    lengths = by.integers(WIDTH + 1, low=3)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    tokens = by.integers(WORDS, WIDTH, low=3) * mask
    hidden = (by.uniform(WIDTH) < 0.4) & (mask == 1)
    hidden[:, 1] = True
    return {
        "input_ids": tokens, "attention_mask": mask, "next": tokens.masked_fill(mask == 0, -100),
        "hidden": tokens.masked_fill(~hidden, -100), "tags": by.integers(CLASSES, WIDTH).masked_fill(mask == 0, -100),
        "replaced": by.integers(2, WIDTH), "class": by.integers(CLASSES), "pair": by.integers(2), "score": by.normal(),
        "begin": (lengths * by.uniform()).long(), "end": lengths - 1,
        "choices": by.integers(WORDS, 2, WIDTH, low=3), "choice": by.integers(2),
    }


def pictures(n: int, seed: int) -> dict[str, Tensor]:
    """Small pictures and what may be said of them, 32 × 32."""
    by = Drawn(n, seed)
    return {
        "pixel_values": by.normal(3, 32, 32), "noise": by.normal(3, 32, 32), "time": by.integers(50),
        "labels": by.integers(CLASSES), "flags": by.integers(2, CLASSES).double(), "map": by.integers(CLASSES, 32, 32),
        "shape": by.integers(2, 1, 32, 32).double(), "shuffled": by.uniform(16),
        "input_ids": by.integers(WORDS, WIDTH, low=3), "text": by.normal(4, 8),
    }


def sounds(n: int, seed: int) -> dict[str, Tensor]:
    """Short waves with what was said in them."""
    by = Drawn(n, seed)
    said = by.integers(WORDS, 3, low=1).masked_fill(torch.arange(3) >= by.integers(4, 1, low=1), -100)
    return {"input_values": by.normal(400), "input_features": by.normal(8, 20), "labels": said}


def graphs(n: int, seed: int) -> list[dict[str, Tensor]]:
    """Graphs of two to six nodes, with a number to tell of each."""
    made: list[dict[str, Tensor]] = []
    for nodes in Drawn(n, seed).integers(7, low=2).tolist():
        by = Drawn(nodes, seed + len(made))
        edges, tags = torch.randint(nodes, (2, 2 * nodes), generator=by.by), by.integers(CLASSES)
        nodewise = {"x": by.normal(6), "z": by.integers(9, low=1), "pos": by.normal(3), "tags": tags}
        made.append({**nodewise, "edges": edges, "y": by.normal()[:1]})
    return made


def join_graphs(some: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One graph of several, as PyG's loader does it."""
    sizes = torch.tensor([len(graph["x"]) for graph in some])
    starts = sizes.cumsum(0) - sizes
    joined: dict[str, Any] = {key: torch.cat([g[key] for g in some]) for key in ("x", "z", "pos", "y", "tags")}
    joined["edges"] = torch.cat([graph["edges"] + start for graph, start in zip(some, starts, strict=True)], 1)
    return {**joined, "batch": torch.arange(len(some)).repeat_interleave(sizes), "graphs": len(some)}


def mlp(inputs: int = 6, outputs: int = CLASSES) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def parts(**modules: nn.Module) -> nn.ModuleDict:
    """Several networks under one roof."""
    return nn.ModuleDict(modules)

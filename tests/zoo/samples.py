"""Batches for the zoo: plain rows, pictures, sentences and graphs."""

from typing import Any

import torch
from torch import Tensor, nn

WORDS, WIDTH, CLASSES = 19, 7, 3


def rows(n: int, seed: int) -> dict[str, Tensor]:
    """A bit of everything that losses of torch ask for; one row, sequence or picture per sample."""
    by = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=by, dtype=torch.float64)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (n, *shape), generator=by)

    lengths = 2 + integers(WIDTH - 2)
    mask = torch.arange(WIDTH) < lengths[:, None]
    tokens = (1 + integers(WORDS - 1, WIDTH)) * mask
    label = integers(CLASSES)
    rare = torch.rand(n, generator=by) < 0.1
    rare[n // 2] = True  # some micro-batches have none, a whole batch always one
    return {
        "x": normal(6),
        "x2": normal(6),
        "x3": normal(6),
        "value": normal(CLASSES),
        "noise": normal(2),
        "label": label,
        "binary": integers(2).double(),
        "flags": integers(2, CLASSES).double(),
        "partly": label.masked_fill(torch.rand(n, generator=by) < 0.3, -100),
        "rare": rare,
        "weight": 0.5 + torch.rand(n, generator=by, dtype=torch.float64),
        "advantage": normal(),
        "user": integers(9),
        "item": integers(9),
        "other": integers(9),
        "sequence": normal(WIDTH, 6),
        "values": normal(WIDTH, CLASSES),
        "tokens": tokens,
        "labels": tokens.masked_fill(~mask, -100),
        "classes": integers(CLASSES, WIDTH),
        "mask": mask.double(),
        "lengths": lengths,
        "spelled": 1 + integers(CLASSES - 1, 2),
        "spelled_lengths": 1 + integers(2),
        "image": normal(3, 16, 16),
        "small": normal(2, 8, 8),
        "regions": integers(CLASSES, 8, 8),
        "shape": integers(2, 1, 8, 8).double(),
        "wave": normal(64),
        "clean": normal(64),
        "points": normal(5, 3),
        "time": integers(50),
    }


def sentences(n: int, seed: int) -> dict[str, Tensor]:
    """Padded sentences with labels of every kind, as tokenizers and collators make them."""
    by = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, WIDTH + 1, (n,), generator=by)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    tokens = torch.randint(3, WORDS, (n, WIDTH), generator=by) * mask
    hidden = (torch.rand(n, WIDTH, generator=by) < 0.4) & (mask == 1)
    hidden[:, 1] = True
    begin = (lengths * torch.rand(n, generator=by)).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "next": tokens.masked_fill(mask == 0, -100),
        "hidden": tokens.masked_fill(~hidden, -100),
        "tags": torch.randint(CLASSES, (n, WIDTH), generator=by).masked_fill(mask == 0, -100),
        "replaced": torch.randint(2, (n, WIDTH), generator=by),
        "class": torch.randint(CLASSES, (n,), generator=by),
        "pair": torch.randint(2, (n,), generator=by),
        "score": torch.randn(n, generator=by, dtype=torch.float64),
        "flags": torch.randint(2, (n, CLASSES), generator=by).double(),
        "begin": begin,
        "end": lengths - 1,
        "choices": torch.randint(3, WORDS, (n, 2, WIDTH), generator=by),
        "choice": torch.randint(2, (n,), generator=by),
    }


def pictures(n: int, seed: int) -> dict[str, Tensor]:
    """Small pictures and what may be said of them, 32 × 32."""
    by = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(n, 3, 32, 32, generator=by, dtype=torch.float64),
        "noise": torch.randn(n, 3, 32, 32, generator=by, dtype=torch.float64),
        "labels": torch.randint(CLASSES, (n,), generator=by),
        "flags": torch.randint(2, (n, CLASSES), generator=by).double(),
        "soft": torch.rand(n, CLASSES, generator=by, dtype=torch.float64).softmax(1),
        "map": torch.randint(CLASSES, (n, 32, 32), generator=by),
        "shape": torch.randint(2, (n, 1, 32, 32), generator=by).double(),
        "time": torch.randint(50, (n,), generator=by),
        "shuffled": torch.rand(n, 16, generator=by, dtype=torch.float64),
        "input_ids": torch.randint(3, WORDS, (n, WIDTH), generator=by),
        "text": torch.randn(n, 4, 8, generator=by, dtype=torch.float64),
    }


def sounds(n: int, seed: int) -> dict[str, Tensor]:
    """Short waves with what was said in them."""
    by = torch.Generator().manual_seed(seed)
    said = torch.randint(1, WORDS, (n, 3), generator=by)
    return {
        "input_values": torch.randn(n, 400, generator=by, dtype=torch.float64),
        "input_features": torch.randn(n, 8, 20, generator=by, dtype=torch.float64),
        "labels": said.masked_fill(torch.arange(3) >= torch.randint(1, 4, (n, 1), generator=by), -100),
        "class": torch.randint(CLASSES, (n,), generator=by),
    }


def graphs(n: int, seed: int) -> list[dict[str, Tensor]]:
    """Graphs of two to six nodes, with a number to tell of each."""
    by = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(n):
        nodes = int(torch.randint(2, 7, (), generator=by))
        made.append(
            {
                "x": torch.randn(nodes, 6, generator=by, dtype=torch.float64),
                "z": torch.randint(1, 9, (nodes,), generator=by),
                "pos": torch.randn(nodes, 3, generator=by, dtype=torch.float64),
                "edges": torch.randint(nodes, (2, 2 * nodes), generator=by),
                "y": torch.randn(1, generator=by, dtype=torch.float64),
                "tags": torch.randint(CLASSES, (nodes,), generator=by),
            }
        )
    return made


def join_graphs(some: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One graph of several, as PyG's loader does it."""
    sizes = torch.tensor([len(graph["x"]) for graph in some])
    starts = sizes.cumsum(0) - sizes
    joined: dict[str, Any] = {key: torch.cat([g[key] for g in some]) for key in ("x", "z", "pos", "y", "tags")}
    joined["edges"] = torch.cat([graph["edges"] + start for graph, start in zip(some, starts, strict=True)], 1)
    joined["batch"] = torch.arange(len(some)).repeat_interleave(sizes)
    joined["graphs"] = len(some)
    return joined


def mlp(inputs: int = 6, outputs: int = CLASSES) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def parts(**modules: nn.Module) -> nn.ModuleDict:
    """Several networks under one roof."""
    return nn.ModuleDict(modules)

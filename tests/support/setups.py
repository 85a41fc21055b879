"""A small `Setup` to train, with what a test sets."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from bigbatch import Setup


def loss_of(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of (inputs, labels)."""
    return cross_entropy(model(batch[0]), batch[1])


def make(**settings: Any) -> Setup:
    """A setup of 70 samples, in float64, with what a test sets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(70, 5, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    defaults: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "data": TensorDataset(inputs, torch.randint(3, (70,), generator=generator)),
        "loss_fn": loss_of,
        "batch_size": 32,
    }
    return Setup(**{**defaults, **settings})

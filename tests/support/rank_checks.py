"""What tests of ranks compare."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.rank_loops import (
    OPTIMIZERS,
    mean,
    model,
    windows_of,
)
from tests.support.reference import distance

SIZES = [[3, 5, 2, 4], [6, 1, 1, 7]]


def weights(network: nn.Module) -> list[Tensor]:
    """Return what was trained."""
    return [p.detach() for p in network.parameters()]


def one_process(steps: int) -> list[Tensor]:
    """Train in one process, each big batch at once."""
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    for window in windows_of(SIZES, steps):
        optimizer.zero_grad()
        mean(network, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
        optimizer.step()
    return weights(network)


def right(found: Sequence[Any], true: Sequence[Tensor]) -> None:
    """Every rank has the weights of one process."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert distance(each, true) <= 1e-12


def refused(found: Sequence[Any], kind: type[Exception], words: str) -> None:
    """Every rank has the same error."""
    for error in found:
        assert isinstance(error, kind), error
        assert words in str(error)

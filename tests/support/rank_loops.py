"""Small training loops of several ranks, and of one process on the union of their batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted
from tests.support.reference import distance

Batch = tuple[Tensor, Tensor]


CLASSES = 4


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def model() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def micro_batch(size: int, seed: int) -> Batch:
    """Return samples, some without a target."""
    by = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=by)
    labels[torch.rand(size, generator=by) < 0.3] = -100
    return torch.randn(size, 5, generator=by, dtype=torch.float64), labels


def batches_of(rank: int, sizes: Sequence[Sequence[int]]) -> list[Batch]:
    """Return the micro-batches of one rank."""
    return [micro_batch(size, 100 * rank + number) for number, size in enumerate(sizes[rank])]


def mean(network: nn.Module, batch: Batch) -> Tensor:
    """A masked mean."""
    return F.cross_entropy(network(batch[0]), batch[1])


def mean_and_weights(network: nn.Module, batch: Batch) -> Tensor:
    """With a term of parameters alone."""
    return mean(network, batch) + 0.01 * sum(p.pow(2).sum() for p in network.parameters())


def summed(network: nn.Module, batch: Batch) -> Tensor:
    """A sum over samples."""
    return F.cross_entropy(network(batch[0]), batch[1], reduction="sum")


def sum_and_weights(network: nn.Module, batch: Batch) -> Tensor:
    """With a term of parameters alone."""
    weight = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
    return counted(summed(network, batch), "sum") + 0.01 * counted(weight, "once")


def two_counts(network: nn.Module, batch: Batch) -> Tensor:
    """Two terms over different things."""
    out = network(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.1 * counted(out.pow(2).mean(), out.numel())


LOSSES = {f.__name__: f for f in (mean, mean_and_weights, summed, sum_and_weights)}


def windows_of(sizes: Sequence[Sequence[int]], steps: int) -> list[list[Batch]]:
    """Return the big batches: the k-th window of every rank together."""
    every = [batches_of(rank, sizes) for rank in range(len(sizes))]
    number = max(-(-len(own) // steps) for own in every)
    return [[b for own in every for b in own[k * steps : (k + 1) * steps]] for k in range(number)]


def truth(sizes: Sequence[Sequence[int]], steps: int, loss: str, optimizer: str) -> Any:
    """Train in one process, each big batch at once."""
    network = model()
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=1, clip_norm=1.0)
    updates = []
    for window in windows_of(sizes, steps):
        whole = (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))
        update = accumulator.backward(LOSSES[loss](network, whole))
        assert update is not None
        updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return [p.detach() for p in network.parameters()], updates


def assert_same(found: Sequence[Any], true: Any, *, all_updates: bool = True) -> None:
    """Every rank has the weights of one process, and saw the same updates."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert distance(each[0], true[0]) <= 1e-12
        if all_updates:
            assert len(each[1]) == len(true[1])
        for mine, others in zip(each[1], true[1], strict=False):
            assert mine[2] == others[2]
            assert mine == pytest.approx(others, rel=1e-12, abs=1e-12, nan_ok=True)


class TwoHeads(nn.Module):
    """One head for each rank, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(5, 8), nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)])
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.seen: Tensor

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Use one of them."""
        self.seen.add_(len(x))
        found: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return found


def two_heads() -> TwoHeads:
    """Return the same on every rank."""
    torch.manual_seed(0)
    return TwoHeads().double()

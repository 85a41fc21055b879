"""Models and losses whose samples are coupled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigStep, Options, across, counted
from tests.support.rank_loops import CLASSES, OPTIMIZERS, Batch, Sizes, joined, mean, micro_batch, weights
from tests.support.reference import distance

STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


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


def spread_and_more(model: Any, batch: Batch) -> Tensor:
    """Two means over different things, and a term of parameters alone."""
    weight = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
    return spread(model, batch) + mean(model, batch) + 0.1 * counted(weight, "once")


def of_values_that_one_rank_has(model: Any, batch: Batch) -> Tensor:
    """Normalise samples of one class alone: a rank may have none."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    hidden = inner.one(batch[0])
    chosen = inner.two(inner.norm(hidden[batch[1] == 0]))
    return counted(chosen.pow(2).sum(), "sum") + counted(inner.two(hidden).pow(2).sum(), "sum")


Coupled = tuple[type[Normalised], Callable[[Any, Batch], Tensor]]
CASES: dict[str, Coupled] = {
    "batch norm": (Normalised, mean),
    "contrastive": (Plain, contrastive),
    "contrastive with batch norm": (Normalised, contrastive),
    "root": (Plain, root),
    "spread": (Plain, spread),
}
LOSSES: dict[str, Coupled] = {
    **CASES,
    "two counts": (Plain, spread_and_more),
    "values": (Normalised, of_values_that_one_rank_has),
}


def compare(rank: int, sizes: Sizes, name: str, activations: Any, device: str = "cpu") -> None:
    """Make each batch of this rank a part of a big one, and that one beside it, all at once in plain PyTorch."""
    kind, loss = LOSSES[name]
    network, twin = DistributedDataParallel(made(kind).to(device), find_unused_parameters=True), made(kind).to(device)
    optimizer, plain = (OPTIMIZERS["sgd"](each.parameters()) for each in (network, twin))
    named: Any = {"micro_batch_size": 2, "clip_norm": 1.0, "options": Options(activations=activations)}
    step = BigStep(network, optimizer, loss, **named)
    for number in range(len(sizes[0])):
        every = [micro_batch(own[number], 100 * each + number) for each, own in enumerate(sizes)]
        x, y = joined(every)
        plain.zero_grad()
        true = loss(twin, (x.to(device), y.to(device)))
        true.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        update = step(every[rank])
        assert update.loss_is_exact == (name != "two counts")
        assert name == "two counts" or float(update.loss) == pytest.approx(float(true.detach()), rel=1e-12)
    assert distance(weights(network), weights(twin)) <= 1e-12
    found, expected = ([each.state_dict()[key].double() for key in STATISTICS] for each in (network.module, twin))
    assert distance(found, expected) <= 1e-12

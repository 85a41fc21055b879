"""Coupled samples over several ranks: BatchNorm and `across` see all micro-batches of all ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigStep, Options, across, counted
from tests.support.rank_loops import OPTIMIZERS, Batch, Sizes, joined, micro_batch, weights
from tests.support.rank_norms import CASES, Normalised, Plain, made
from tests.support.ranks import exactly
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def spread_and_more(network: Any, batch: Batch) -> Tensor:
    """Two means over different things, and a term of parameters alone."""
    out = network(batch[0])
    weight = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
    spread = (out - across.mean(out.mean(0))).pow(2).mean()
    return spread + F.cross_entropy(out, batch[1]) + 0.1 * counted(weight, "once")


def of_values_that_one_rank_has(network: Any, batch: Batch) -> Tensor:
    """Normalise samples of one class alone: a rank may have none."""
    inner = network.module if isinstance(network, DistributedDataParallel) else network
    hidden = inner.one(batch[0])
    chosen = inner.two(inner.norm(hidden[batch[1] == 0]))
    return counted(chosen.pow(2).sum(), "sum") + counted(inner.two(hidden).pow(2).sum(), "sum")


LOSSES: dict[str, tuple[type[Normalised], Any]] = {
    **CASES,
    "two counts": (Plain, spread_and_more),
    "values": (Normalised, of_values_that_one_rank_has),
}
SIZES = [[[3, 5, 4], [7, 4, 2]], [[2, 5], [6, 2], [4, 4]]]


def train(rank: int, sizes: Sizes, name: str, activations: Any) -> Any:
    """Make each batch of this rank a part of a big one."""
    kind, loss = LOSSES[name]
    network = DistributedDataParallel(made(kind), find_unused_parameters=True)
    optimizer, options = OPTIMIZERS["sgd"](network.parameters()), Options(activations=activations)
    step = BigStep(network, optimizer, loss, micro_batch_size=2, clip_norm=1.0, options=options)
    updates = [step(micro_batch(size, 100 * rank + n)) for n, size in enumerate(sizes[rank])]
    losses = [float(each.loss) for each in updates if each.loss_is_exact]
    state = network.module.state_dict()
    return weights(network), losses, [state[each].double() for each in STATISTICS]


@pytest.mark.parametrize(
    ("name", "sizes", "activations"),
    [
        *[(name, sizes, "auto") for name in CASES for sizes in SIZES],
        *[("contrastive", [[5, 4], [6, 3]], activations) for activations in ("keep", "recompute")],
        ("two counts", SIZES[0], "auto"),
        ("values", [[8], [1]], "auto"),
    ],
    ids=str,
)
def test_micro_batches_of_all_ranks_meet(name: str, sizes: Sizes, activations: str) -> None:
    """Weights, losses and running statistics are those of one process; some ranks have one micro-batch alone."""
    kind, loss = LOSSES[name]
    network = made(kind)
    optimizer, losses = OPTIMIZERS["sgd"](network.parameters()), []
    for number in range(len(sizes[0])):
        optimizer.zero_grad()
        value = loss(network, joined([micro_batch(own[number], 100 * rank + number) for rank, own in enumerate(sizes)]))
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(float(value.detach()))
    state = network.state_dict()
    for found, said, statistics in exactly(len(sizes), train, sizes, name, activations):
        assert distance(found, weights(network)) <= 1e-12
        assert said == pytest.approx([] if name == "two counts" else losses, rel=1e-12)
        assert distance(statistics, [state[name].double() for name in STATISTICS]) <= 1e-12

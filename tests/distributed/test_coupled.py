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
    exactly(len(sizes), compare, sizes, name, activations)


def compare(rank: int, sizes: Sizes, name: str, activations: Any) -> None:
    """Make each batch of this rank a part of a big one."""
    kind, loss = LOSSES[name]
    network, twin = DistributedDataParallel(made(kind), find_unused_parameters=True), made(kind)
    optimizer, plain = (OPTIMIZERS["sgd"](each.parameters()) for each in (network, twin))
    named: Any = {"micro_batch_size": 2, "clip_norm": 1.0, "options": Options(activations=activations)}
    step = BigStep(network, optimizer, loss, **named)
    for number in range(len(sizes[0])):
        every = [micro_batch(own[number], 100 * each + number) for each, own in enumerate(sizes)]
        plain.zero_grad()
        true = loss(twin, joined(every))
        true.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        update = step(every[rank])
        assert update.loss_is_exact == (name != "two counts")
        assert name == "two counts" or float(update.loss) == pytest.approx(float(true.detach()), rel=1e-12)
    assert distance(weights(network), weights(twin)) <= 1e-12
    found, expected = ([each.state_dict()[key].double() for key in STATISTICS] for each in (network.module, twin))
    assert distance(found, expected) <= 1e-12

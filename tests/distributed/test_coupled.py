"""Coupled samples over several ranks: BatchNorm and `across` see all micro-batches of all ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigStep, Options
from bigbatch.errors import WindowError
from tests.support.rank_loops import OPTIMIZERS, micro_batch
from tests.support.rank_norms import CASES, made
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks


STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def train(rank: int, sizes: Sequence[Sequence[int]], name: str, activations: Any) -> Any:
    """Make each batch of this rank a part of a big one."""
    kind, loss = CASES[name]
    network = DistributedDataParallel(made(kind), find_unused_parameters=True)
    options = Options(activations=activations)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    step = BigStep(network, optimizer, loss, micro_batch_size=2, clip_norm=1.0, options=options)
    losses = []
    for number, size in enumerate(sizes[rank]):
        losses.append(float(step(micro_batch(size, 100 * rank + number)).loss))
    state = network.module.state_dict()
    return [p.detach() for p in network.parameters()], losses, [state[each].double() for each in STATISTICS]


@pytest.mark.parametrize("sizes", [[[3, 5, 4], [7, 4, 2]], [[2, 5], [6, 2], [4, 4]]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_all_ranks_meet(name: str, sizes: list[list[int]]) -> None:
    """Weights, losses and running statistics are those of one process; some ranks have one micro-batch."""
    kind, loss = CASES[name]
    network = made(kind)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    losses = []
    for number in range(len(sizes[0])):
        parts = [micro_batch(own[number], 100 * rank + number) for rank, own in enumerate(sizes)]
        optimizer.zero_grad()
        value = loss(network, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(float(value.detach()))
    state = network.state_dict()
    for each in run_on_ranks(len(sizes), train, sizes, name, "auto"):
        if isinstance(each, BaseException):
            raise each
        assert distance(each[0], [p.detach() for p in network.parameters()]) <= 1e-12
        assert each[1] == pytest.approx(losses, rel=1e-12)
        assert distance(each[2], [state[name].double() for name in STATISTICS]) <= 1e-12


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_however_activations_wait(activations: str) -> None:
    """A model that runs again meets no one on the way."""
    sizes = [[5, 4], [6, 3]]
    one, other = run_on_ranks(2, train, sizes, "contrastive", activations)
    again, _ = run_on_ranks(2, train, sizes, "contrastive", "auto")
    for each in (one, other, again):
        if isinstance(each, BaseException):
            raise each
    assert distance(one[0], other[0]) == 0
    assert distance(one[0], again[0]) <= 1e-12


def without_samples(rank: int, name: str) -> Any:
    """Have none in the second update."""
    kind, loss = CASES[name]
    network = DistributedDataParallel(made(kind), find_unused_parameters=True)
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), loss, micro_batch_size=2)
    step(micro_batch(4, rank))
    step(None if rank else micro_batch(4, rank))


@pytest.mark.parametrize("name", ["batch norm", "contrastive"])
def test_a_rank_without_samples_is_told_that_it_has_none(name: str) -> None:
    """The others are at another place, and hear of that."""
    one, other = run_on_ranks(2, without_samples, name)
    assert isinstance(one, WindowError), one
    assert isinstance(other, WindowError), other
    assert "this rank has no samples in this update, and samples are coupled" in str(other)
    assert "Give every rank a part of each batch" in str(other)

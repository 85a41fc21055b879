"""Derivatives inside of a loss, as of an adversarial attack, that go through norms over several ranks."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigStep
from bigbatch.errors import LossError
from tests.reference import distance
from tests.support.rank_loops import OPTIMIZERS, micro_batch
from tests.support.rank_norms import Batch, Normalised, made
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.ranks

SIZES = (3, 6)


def attacked(model: Any, batch: Batch, reduction: str) -> Tensor:
    """Be trained on what the model likes least."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), batch[1], reduction=reduction), x)
    return F.cross_entropy(model(batch[0] + 0.1 * slope.sign()), batch[1])


def train(rank: int, size: int, reduction: str) -> list[Tensor]:
    """Make one update of this rank's part of a batch."""
    network = DistributedDataParallel(made(Normalised), find_unused_parameters=True)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    step = BigStep(network, optimizer, partial(attacked, reduction=reduction), micro_batch_size=size)
    step(micro_batch(SIZES[rank], rank))
    return [p.detach() for p in network.parameters()]


@pytest.mark.parametrize("size", [2, 8])
def test_of_sums_over_samples(size: int) -> None:
    """It is that of one process, also where each rank has one micro-batch."""
    network = made(Normalised)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    parts = [micro_batch(number, rank) for rank, number in enumerate(SIZES)]
    batch = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    attacked(network, batch, "sum").backward()
    optimizer.step()
    for each in run_on_ranks(len(SIZES), train, size, "sum"):
        if isinstance(each, BaseException):
            raise each
        assert distance(each, [p.detach() for p in network.parameters()]) <= 1e-12


@pytest.mark.parametrize("size", [2, 8])
def test_of_means_it_is_refused(size: int) -> None:
    """Those of ranks do not add up to the big batch's, no more than those of micro-batches."""
    found = run_on_ranks(len(SIZES), train, size, "mean")
    assert all(isinstance(each, Exception) for each in found), found
    refused = [each for each in found if isinstance(each, LossError)]
    assert any("a derivative inside of the loss goes through BatchNorm" in str(each) for each in refused), found

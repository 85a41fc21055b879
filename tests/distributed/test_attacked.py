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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [2, 8])
def test_it_is_refused(size: int, reduction: str) -> None:
    """Derivatives inside a loss do not add up over ranks, no more than over micro-batches."""
    found = run_on_ranks(len(SIZES), train, size, reduction)
    assert all(isinstance(each, Exception) for each in found), found
    refused = [each for each in found if isinstance(each, LossError)]
    assert any("a derivative inside of the loss goes through BatchNorm" in str(each) for each in refused), found

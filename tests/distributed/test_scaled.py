"""A gradient scaler over ranks: what one process would not skip, no rank does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep
from tests.support.rank_loops import batches_of
from tests.support.rank_shards import shards, whole
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

SAMPLES = 512  # of which a loss in float16 would overflow, weighed by their number
UNEVEN = [[3, 5, 2, 1, 4], [6, 1, 1]]


def scaled(rank: int, way: str) -> Any:
    """Make updates in float16, with the scale that a scaler begins with."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
    network = shards(plain) if "shards" in way else DistributedDataParallel(plain)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    by = torch.Generator().manual_seed(rank)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(net(batch[0]), batch[1])

    update: Callable[[Any], Any]
    if "big step" in way:
        update = BigStep(network, optimizer, loss, micro_batch_size=SAMPLES // 2, scaler=scaler)
    else:
        accumulator = Accumulator(network, optimizer, steps=2, scaler=scaler, overlap="overlap" in way)

        def update(batch: Any) -> Any:
            return accumulator.backward(loss(network, batch))

    batches = [(torch.randn(SAMPLES, 5, generator=by), torch.randint(4, (SAMPLES,), generator=by)) for _ in range(4)]
    updates = [update(batch) for batch in batches]
    return [each.skipped for each in updates if each is not None], scaler.get_scale()


@pytest.mark.parametrize("way", ["ddp", "overlap", "shards", "overlapped shards", "shards and a big step"])
def test_weights_do_not_overflow(way: str) -> None:
    """They are those of a mean, in a unit that ranks have agreed on."""
    for skipped, scale in run_on_ranks(2, scaled, way):
        assert not any(skipped)
        assert scale == 2.0**16


def in_one_unit(rank: int, overlap: bool, scale: bool) -> Any:
    """Train with uneven windows; some ranks pass by in whole ones."""
    torch.manual_seed(0)
    network = shards(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scale else None
    accumulator = Accumulator(network, optimizer, steps=2, scaler=scaler, overlap=overlap, clip_norm=1.0)
    for x, y in accumulator.over(batches_of(rank, UNEVEN)):
        accumulator.backward(F.cross_entropy(network(x), y))
    return whole(network)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_unit_is_corrected_for(overlap: bool) -> None:
    """With a scaler ranks come to the weights that they come to without."""
    for plain, with_scaler in zip(
        *(run_on_ranks(2, in_one_unit, overlap, scale) for scale in (False, True)), strict=True
    ):
        assert distance(with_scaler, plain) <= 1e-12

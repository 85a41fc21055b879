"""Parts of a sharded model that some ranks run and others leave out: right, or an error on all."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator
from bigbatch.errors import ConfigurationError, WindowError
from tests.support.rank_checks import SIZES, refused, right
from tests.support.rank_loops import CLASSES, OPTIMIZERS, batches_of, micro_batch
from tests.support.rank_shards import model, shards, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.ranks


class Heads(nn.Module):
    """A trunk and two heads of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(5, 6), nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Run one of them."""
        return self.heads[head](torch.tanh(self.trunk(x)))


PATHS = {  # by rank and micro-batch: which head it runs
    "each rank its own": [[0, 0], [1, 1]],
    "all of them, in turn": [[0, 1], [1, 0]],
    "the same": [[0, 1], [0, 1]],
    "never the second": [[0, 0], [0, 0]],
}


def over_heads(rank: int, path: str, overlap: bool) -> Any:
    """Make an update of two micro-batches, each through one head."""
    network = shards(Heads(), [])
    chosen = OPTIMIZERS["adamw"](network.parameters())
    accumulator = Accumulator(network, chosen, steps=2, overlap=overlap)
    for head, batch in zip(PATHS[path][rank], batches_of(rank, SIZES), strict=False):
        accumulator.backward(F.cross_entropy(network(batch[0], head), batch[1]))
    return whole(network)


def over_heads_at_once(path: str) -> list[Tensor]:
    """Do so in one process."""
    network = Heads()
    chosen = OPTIMIZERS["adamw"](network.parameters())
    every = [(h, b) for rank in range(2) for h, b in zip(PATHS[path][rank], batches_of(rank, SIZES), strict=False)]
    total = sum((y >= 0).sum() for _, (_, y) in every)
    sums = [F.cross_entropy(network(x, head), y, reduction="sum") for head, (x, y) in every]
    (torch.stack(sums).sum() / total).backward()
    chosen.step()
    return [p.detach() for p in network.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_ranks_that_reach_other_shards_are_told_or_right(path: str, overlap: bool) -> None:
    """FSDP would add gradients of one head to those of the other, without a word."""
    found = run_on_ranks(2, over_heads, path, overlap)
    if path == "each rank its own" or (path == "all of them, in turn" and not overlap):
        refused(found, WindowError, "have reached other parameters on one rank than on another")
    else:
        right(found, over_heads_at_once(path))


def over_replicas(rank: int, path: str) -> Any:
    """Have ranks of two replicas of two shards run a head each, for one update."""
    network = shards(Heads(), [], (2, 2))
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    x, y = micro_batch(4, rank)
    accumulator.backward(F.cross_entropy(network(x, rank // 2 if path == "apart" else rank % 2), y.clamp(min=0)))
    return whole(network)


def test_replicas_may_reach_other_shards() -> None:
    """They are added up by parameters; ranks of one replica are not."""
    one, *others = run_on_ranks(4, over_replicas, "apart")
    right(others, one)
    refused(run_on_ranks(4, over_replicas, "within"), WindowError, "have reached other parameters on one rank")


def dropping(rank: int, on: tuple[int, ...]) -> Any:
    """Drop the first micro-batch on some ranks, and make two updates of the others."""
    network = shards(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=4)
    for number, (x, y) in enumerate(batches_of(rank, SIZES)):
        accumulator.backward(F.cross_entropy(network(x), y))
        if number == 0 and rank in on:
            accumulator.discard()
        if number in {1, 3}:
            accumulator.flush()
    return whole(network)


def test_ranks_drop_a_window_together() -> None:
    """A rank that drops alone what all have added has the others' shards with it, and its own without."""
    refused(run_on_ranks(2, dropping, (1,)), WindowError, "or one rank has dropped a window that others go on with")
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    for numbers in ([1], [2, 3]):
        every = [batches_of(rank, SIZES)[number] for rank in range(2) for number in numbers]
        optimizer.zero_grad()
        F.cross_entropy(network(torch.cat([x for x, _ in every])), torch.cat([y for _, y in every])).backward()
        optimizer.step()
    right(run_on_ranks(2, dropping, (0, 1)), [p.detach() for p in network.parameters()])


def hooked(rank: int, when: str) -> Any:
    """Have FSDP call a function of one's own for what it has reduced, such as one that adds up over other ranks."""
    network: Any = shards(model())
    if when == "before":
        network.set_all_reduce_hook(lambda gradient: gradient.mul_(2.0))
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    network.set_all_reduce_hook(lambda gradient: gradient.mul_(2.0))
    x, y = micro_batch(4, rank)
    accumulator.backward(F.cross_entropy(network(x), y.clamp(min=0)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_shards_is_refused(when: str) -> None:
    """What it adds, nobody has counted."""
    refused(run_on_ranks(2, hooked, when), ConfigurationError, "set_all_reduce_hook(...)")

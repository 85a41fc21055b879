"""Several ranks that would part, die or wait without a word: each is right to 1e-12, or all of them say what it is."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator
from bigbatch.errors import LossError
from tests.ranks import run_on_ranks
from tests.test_ranks import OPTIMIZERS, batches_of, mean, model
from tests.test_ranks_hard import SIZES, refused

# DDP's own reduction, window after window.


def past_the_wrapper_later(rank: int) -> Any:
    """Call DDP in the first window, and the module inside it in those after."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, overlap=True)
    for number, batch in enumerate(accumulator.over(batches_of(rank, SIZES))):
        accumulator.backward(mean(network.module if number else network, batch))


def test_what_ddp_has_reduced_before_says_nothing_of_now() -> None:
    """Each window is asked anew."""
    refused(run_on_ranks(2, past_the_wrapper_later), LossError, "DDP has not reduced all")


def counting_broadcasts(rank: int) -> Any:
    """Count how often buffers are sent."""
    network = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().eval())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    accumulator = Accumulator(network, optimizer, steps=1, overlap=True)
    sent = []
    plain: Any = network._sync_buffers

    def counting() -> None:
        sent.append(1)
        plain()

    vars(network)["_sync_buffers"] = counting
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))
    return len(sent)


def test_buffers_are_sent_once_per_update() -> None:
    """Also where DDP reduces, whose forward would send them, too."""
    assert run_on_ranks(2, counting_broadcasts) == [4, 4]

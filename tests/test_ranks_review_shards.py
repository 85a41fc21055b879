"""Sharded models in hard places: several models, nested loops, failures, other numbers of steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator
from bigbatch.errors import StateError
from tests.ranks import run_on_ranks
from tests.reference import distance
from tests.test_ranks import OPTIMIZERS, batches_of, mean, micro_batch, windows_of
from tests.test_ranks_sharded import model, shards

SIZES = [[3, 5, 2, 4], [6, 1, 1, 7]]
WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel, "shards": shards}


def tried(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns, or raises: several attempts may share the processes that make them."""
    try:
        return work(*arguments)
    except Exception as error:  # noqa: BLE001 - to be looked at
        return error


def refused(found: Sequence[Any], kind: type[BaseException], says: str) -> None:
    """See that all have raised the same."""
    for error in found:
        assert isinstance(error, kind), error
        assert says in str(error)


def same(found: Sequence[Any], true: Sequence[Tensor]) -> None:
    """See that all have come to the same weights."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert distance(each, true) <= 1e-12


def weights(network: nn.Module) -> list[Tensor]:
    """Return the full weights of any model."""
    found: list[Any] = [p.detach() for p in network.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


def loaded(rank: int) -> Any:
    """Load a window that one process has left open."""
    alone = model()
    one = Accumulator(alone, OPTIMIZERS["sgd"](alone.parameters()), steps=2)
    one.backward(mean(alone, micro_batch(6, 7)))
    state = one.state_dict()
    one.discard()

    def load(kind: str, overlap: bool) -> Any:
        network = WRAPPED[kind](model())
        accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=overlap)
        accumulator.load_state_dict(state)
        return accumulator.backward(mean(network, micro_batch(4, rank)))

    return [tried(load, kind, overlap) for kind in WRAPPED for overlap in (False, True)]


def test_an_open_window_of_one_process_is_not_loaded_by_several() -> None:
    """Each of them would add its gradients once."""
    for found in run_on_ranks(2, loaded):
        refused(found, StateError, "save between two updates")


def shorter(rank: int) -> Any:
    """Make a window of two micro-batches, and two of one, by hand."""
    found = []
    for wrapped in WRAPPED.values():
        network = wrapped(model())
        accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.1), steps=2, overlap=True)
        for number, batch in enumerate(batches_of(rank, SIZES)):
            if number == 2:
                accumulator.steps = 1
            accumulator.backward(mean(network, batch))
        found.append(weights(network))
    return found


def test_steps_may_change_between_windows_that_reduce_once() -> None:
    """The next micro-batch is then its window's last, and known to be."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for window in (windows_of(SIZES, 2)[0], *windows_of(SIZES, 1)[2:]):
        optimizer.zero_grad()
        mean(network, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
        optimizer.step()
    for each in run_on_ranks(2, shorter):
        if isinstance(each, BaseException):
            raise each
        same(each, weights(network))

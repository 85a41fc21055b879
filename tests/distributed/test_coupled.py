"""Coupled samples over several ranks: micro-batches of all meet; where ranks do not do the same, none waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigStep, Options, across
from tests.support.rank_loops import OPTIMIZERS, Batch, Sizes, heard, joined, micro_batch, weights
from tests.support.rank_norms import CASES, compare
from tests.support.ranks import exactly, on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

SIZES = [[[3, 5, 4], [7, 4, 2]], [[2, 5], [6, 2], [4, 4]]]
LIMIT = 15.0  # seconds: less than torch would wait
Loss = Callable[[int, Tensor], Any]  # of a rank, and of what the model returned: what is taken off that


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


# Ranks that do not do the same: an error on all, or all begin again.


class Layer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        """Make the same on every rank."""
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, 4)."""
        found: Tensor = self.layer(x)
        return found


class Centred(Layer):
    """Whose micro-batches meet inside of it."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, 4), around the mean of all."""
        found: Tensor = self.layer(x)
        return found - across.mean(found.mean(0))


def centre(out: Tensor) -> Tensor:
    """Return the mean of all samples."""
    return across.mean(out.mean(0))


def in_order(rank: int, out: Tensor) -> Any:
    """Ask for the same two things, in another order on each rank."""
    asked: list[Callable[[], Tensor]] = [
        lambda: across.mean(out[:, :2].mean()),
        lambda: across.gather(out[:, :2]).mean(),
    ]
    return sum(ask() for ask in (asked if rank else reversed(asked)))


def raising(rank: int, out: Tensor) -> Any:
    """Raise on one rank, after a first meeting, and while the other waits at the second."""
    first = centre(out)
    if rank:
        raise KeyError("labels")
    return across.mean(first)


def step_of(network: nn.Module, loss: Any) -> BigStep:
    """Return what makes steps of micro-batches of two."""
    options = Options(check=False)
    return BigStep(network, OPTIMIZERS["sgd"](network.parameters()), loss, micro_batch_size=2, options=options)


PATHS: dict[str, tuple[Loss, str]] = {
    "gather or mean": (lambda rank, out: across.gather(out).mean() if rank else centre(out).mean(), "PathsDiffer"),
    "sum or mean": (lambda rank, out: (across.sum if rank else across.mean)(out.mean(0)), "PathsDiffer"),
    "other shapes": (lambda rank, out: across.gather(out[:, : 2 + rank]).mean(), "PathsDiffer"),
    "other orders": (in_order, "PathsDiffer"),
    "once more": (lambda rank, out: across.mean(centre(out)) if rank else centre(out), "PathsDiffer"),
    "in backward": (lambda rank, out: centre(out).detach() if rank else centre(out), "PathsDiffer|WindowError"),
    "nothing": (lambda rank, out: 0.0 if rank else centre(out), "PathsDiffer|WindowError"),
    "raising": (raising, "RankFailed|KeyError"),
}


@pytest.mark.parametrize("samples", [4, 2])  # one micro-batch, or two
@pytest.mark.parametrize("name", PATHS)
@on_ranks(2, limit=LIMIT)
def test_ranks_at_different_places_all_say_so(rank: int, name: str, samples: int) -> None:
    """By name and place; nothing was changed, and ranks that have heard of an error can go on."""
    network = DistributedDataParallel(Layer())

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        return (out - PATHS[name][0](rank, out)).pow(2).mean()

    step = step_of(network, loss)
    before = [p.clone() for p in weights(network)]
    found = heard(step, micro_batch(samples if rank else 4, rank))
    assert distance(weights(network), before) == 0
    assert all(p.grad is None for p in network.parameters())
    kinds = PATHS[name][1].split("|")
    assert found.partition(":")[0] in kinds, found
    if kinds == ["PathsDiffer"]:
        assert "    rank 1: across." in found
        assert "test_coupled.py, line" in found
    if name == "gather or mean":
        assert "rank 0: across.mean of [4] float64" in found
        assert "rank 1: across.gather of [rows, 4] float64" in found


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(2, limit=LIMIT)
def test_ranks_begin_a_window_anew_together(rank: int, inside: bool) -> None:
    """Where one has several micro-batches of a model that meets inside, or no memory; the update is the big batch's."""
    network = DistributedDataParallel((Centred if inside else Layer)())

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        if inside:
            return out.pow(2).mean()
        mean = centre(out)
        if rank and len(out) > 1:
            raise torch.OutOfMemoryError
        return (out - mean).pow(2).mean()

    step, twin = step_of(network, loss), Layer()
    optimizer = OPTIMIZERS["sgd"](twin.parameters())
    for number, sizes in enumerate([(2, 6), (5, 3)]):
        every = [micro_batch(size, 10 * each + number) for each, size in enumerate(sizes)]
        out = twin(joined(every)[0])
        true = (out - out.mean(0)).pow(2).mean()
        optimizer.zero_grad()
        true.backward()
        optimizer.step()
        assert float(step(every[rank]).loss) == pytest.approx(float(true.detach()), rel=1e-12)
    assert distance(weights(network), weights(twin)) <= 1e-12

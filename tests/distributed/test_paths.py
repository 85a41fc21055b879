"""Coupled samples over several ranks that do not do the same: an error on all, or all begin again; none waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigStep, Options, across
from bigbatch.errors import PathsDiffer, RankFailed, WindowError
from tests.support.rank_loops import OPTIMIZERS, Batch, micro_batch
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

LIMIT = 15.0  # seconds: less than torch would wait
RANKS = 2


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


Loss = Callable[[Any, Batch], Tensor]


def gather_or_mean(rank: int) -> Loss:
    """Ask for all rows here, and for their mean there."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        every = across.gather(out) if rank else across.mean(out.mean(0))
        return (out - every.mean()).pow(2).mean()

    return loss


def sum_or_mean(rank: int) -> Loss:
    """Ask for values of one shape that mean different things."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        ask = across.sum if rank else across.mean
        return (out - ask(out.mean(0))).pow(2).mean()

    return loss


def other_shapes(rank: int) -> Loss:
    """Give rows of other lengths."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        return (out - across.gather(out[:, : 2 + rank]).mean()).pow(2).mean()

    return loss


def other_orders(rank: int) -> Loss:
    """Ask for the same two things, in another order."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        found = [one(out[:, :2]) for one in ([_rows, _mean] if rank else [_mean, _rows])]
        return (out - sum(found)).pow(2).mean()

    return loss


def _rows(x: Tensor) -> Tensor:
    return across.gather(x).mean()


def _mean(x: Tensor) -> Tensor:
    return across.mean(x.mean())


def once_more(rank: int) -> Loss:
    """Ask once more on one rank, where the other is at its end."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        centre = across.mean(out.mean(0))
        return (out - (across.mean(centre) if rank else centre)).pow(2).mean()

    return loss


def in_backward(rank: int) -> Loss:
    """Have no gradient go through what was shared, on one rank."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        centre = across.mean(out.mean(0))
        return (out - (centre.detach() if rank else centre)).pow(2).mean()

    return loss


def nothing(rank: int) -> Loss:
    """Ask for nothing on one rank."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        return (out - (0.0 if rank else across.mean(out.mean(0)))).pow(2).mean()

    return loss


def raising(rank: int) -> Loss:
    """Raise on one rank, after a first meeting, and while the other waits at the second."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        centre = across.mean(out.mean(0))
        if rank:
            raise KeyError("labels")
        return (out - across.mean(centre)).pow(2).mean()

    return loss


def stepped(rank: int, loss_of: Callable[[int], Loss], sizes: list[int]) -> Any:
    """Make one update; errors are returned."""
    network = DistributedDataParallel(Layer())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    options = Options(check=False)
    step = BigStep(network, optimizer, loss_of(rank), micro_batch_size=2, options=options)
    before = [p.detach().clone() for p in network.parameters()]
    try:
        step(micro_batch(sizes[rank], rank))
    except Exception as error:  # noqa: BLE001 - to be looked at by the test
        assert distance([p.detach() for p in network.parameters()], before) == 0
        assert all(p.grad is None for p in network.parameters())
        return type(error), str(error)
    return None


DIFFERENT = [gather_or_mean, sum_or_mean, other_shapes, other_orders, once_more, in_backward, nothing, raising]


def all_of_them(rank: int) -> dict[str, Any]:
    """Do one after the other: ranks that have heard of an error can go on."""
    return {f"{work.__name__} {n}": stepped(rank, work, [4, n]) for work in DIFFERENT for n in (4, 2)}


@pytest.fixture(scope="module")
def different() -> list[Any]:
    """What ranks that do not do the same came to."""
    found = run_on_ranks(RANKS, all_of_them, limit=2 * LIMIT)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.parametrize("samples", [4, 2])
@pytest.mark.parametrize("work", [gather_or_mean, sum_or_mean, other_shapes, other_orders, once_more])
def test_ranks_at_different_meetings_all_say_so(different: Any, work: Callable[[int], Loss], samples: int) -> None:
    """By name and place, whether the other rank has one micro-batch or several; nothing was changed."""
    for kind, said in (each[f"{work.__name__} {samples}"] for each in different):
        assert kind is PathsDiffer, said
        assert "rank 0 is at " in said
        assert "rank 1 is at " in said
        assert "across." in said
        assert "test_paths.py, line" in said


def test_the_error_says_where_each_rank_is(different: Any) -> None:
    """What was asked for, of which shape, and from which line; or that it has come to the end."""
    said = different[0]["gather_or_mean 4"][1]
    assert "rank 0 is at across.mean of [4] float64" in said
    assert "rank 1 is at across.gather of [rows, 4] float64" in said
    assert "rank 0 is at the end of forward" in different[1]["once_more 4"][1]


@pytest.mark.parametrize("samples", [4, 2])
@pytest.mark.parametrize("work", [in_backward, nothing])
def test_ranks_at_the_end_of_a_window_that_others_are_inside_of(
    different: Any, work: Callable[[int], Loss], samples: int
) -> None:
    """One is at its statement already: all hear that they are at different places."""
    for kind, said in (each[f"{work.__name__} {samples}"] for each in different):
        assert kind in {WindowError, PathsDiffer}, said
        assert "different places" in said or "different paths" in said


@pytest.mark.parametrize("samples", [4, 2])
def test_a_rank_that_raises_between_two_meetings_is_heard(different: Any, samples: int) -> None:
    """The other one does not wait for it."""
    (waiting, said), (raised, _) = (each[f"raising {samples}"] for each in different)
    assert waiting is RankFailed, said
    assert raised is KeyError


def out_of_memory_on_one(rank: int) -> Loss:
    """Run out of memory with two samples at a time, on one rank."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        centre = across.mean(out.mean(0))
        if rank and len(out) > 1:
            raise torch.OutOfMemoryError
        return (out - centre).pow(2).mean()

    return loss


def centred(_: int) -> Loss:
    """Meet inside of the model, so that it cannot run again: a rank with several micro-batches finds that out."""
    return lambda model, batch: model(batch[0]).pow(2).mean()


def two_steps(rank: int, model: type[Layer], loss_of: Callable[[int], Loss]) -> Any:
    """Make two updates; at first one rank has one micro-batch alone."""
    network = DistributedDataParallel(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    step = BigStep(network, optimizer, loss_of(rank), micro_batch_size=2, options=Options(check=False))
    losses = [float(step(micro_batch(size, 10 * rank + n)).loss) for n, size in enumerate([[2, 5], [6, 3]][rank])]
    return [p.detach() for p in network.parameters()], losses


def both(rank: int) -> Any:
    """Have one rank begin its window anew, in either way."""
    return two_steps(rank, Centred, centred), two_steps(rank, Layer, out_of_memory_on_one)


def test_ranks_begin_a_window_anew_together() -> None:
    """Where one of them has to: the model cannot run again, or its memory ran out. The update is the big batch's."""
    network = Layer()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    losses = []
    for n, sizes in enumerate([(2, 6), (5, 3)]):
        out = network(torch.cat([micro_batch(size, 10 * rank + n)[0] for rank, size in enumerate(sizes)]))
        loss = (out - out.mean(0)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for each in run_on_ranks(RANKS, both, limit=2 * LIMIT):
        if isinstance(each, BaseException):
            raise each
        for weights, found in each:
            assert found == pytest.approx(losses, rel=1e-12)
            assert distance(weights, [p.detach() for p in network.parameters()]) <= 1e-12

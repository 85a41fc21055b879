"""Several ranks, real process groups: the same final weights as one process on the union of the batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, counted
from tests.ranks import run_on_ranks
from tests.reference import distance

Batch = tuple[Tensor, Tensor]
CLASSES = 4
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def model() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def micro_batch(size: int, seed: int) -> Batch:
    """Return samples, some without a target."""
    by = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=by)
    labels[torch.rand(size, generator=by) < 0.3] = -100
    return torch.randn(size, 5, generator=by, dtype=torch.float64), labels


def batches_of(rank: int, sizes: Sequence[Sequence[int]]) -> list[Batch]:
    """Return the micro-batches of one rank."""
    return [micro_batch(size, 100 * rank + number) for number, size in enumerate(sizes[rank])]


def mean(network: nn.Module, batch: Batch) -> Tensor:
    """A masked mean."""
    return F.cross_entropy(network(batch[0]), batch[1])


def mean_and_weights(network: nn.Module, batch: Batch) -> Tensor:
    """With a term of parameters alone."""
    return mean(network, batch) + 0.01 * sum(p.pow(2).sum() for p in network.parameters())


def summed(network: nn.Module, batch: Batch) -> Tensor:
    """A sum over samples."""
    return F.cross_entropy(network(batch[0]), batch[1], reduction="sum")


def sum_and_weights(network: nn.Module, batch: Batch) -> Tensor:
    """With a term of parameters alone."""
    weight = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
    return counted(summed(network, batch), "sum") + 0.01 * counted(weight, "once")


def two_counts(network: nn.Module, batch: Batch) -> Tensor:
    """Two terms over different things."""
    out = network(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.1 * counted(out.pow(2).mean(), out.numel())


LOSSES = {f.__name__: f for f in (mean, mean_and_weights, summed, sum_and_weights)}


def windows_of(sizes: Sequence[Sequence[int]], steps: int) -> list[list[Batch]]:
    """Return the big batches: the k-th window of every rank together."""
    every = [batches_of(rank, sizes) for rank in range(len(sizes))]
    number = max(-(-len(own) // steps) for own in every)
    return [[b for own in every for b in own[k * steps : (k + 1) * steps]] for k in range(number)]


def train(  # noqa: PLR0917 - what the ranks are sent
    rank: int, sizes: Sequence[Sequence[int]], steps: int, loss: str, optimizer: str, ddp: dict[str, Any]
) -> Any:
    """Train on one rank; returns weights, optimizer state, losses and norms."""
    network: nn.Module = DistributedDataParallel(model(), **ddp)
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=steps, clip_norm=1.0)
    updates = []
    for batch in accumulator.over(batches_of(rank, sizes)):
        update = accumulator.backward(LOSSES[loss](network, batch))
        if update is not None:
            updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return [p.detach() for p in network.parameters()], updates


def truth(sizes: Sequence[Sequence[int]], steps: int, loss: str, optimizer: str) -> Any:
    """Train in one process, each big batch at once."""
    network = model()
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=1, clip_norm=1.0)
    updates = []
    for window in windows_of(sizes, steps):
        whole = (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))
        update = accumulator.backward(LOSSES[loss](network, whole))
        assert update is not None
        updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return [p.detach() for p in network.parameters()], updates


def assert_same(found: Sequence[Any], true: Any, *, all_updates: bool = True) -> None:
    """Every rank has the weights of one process, and saw the same updates."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert distance(each[0], true[0]) <= 1e-12
        if all_updates:
            assert len(each[1]) == len(true[1])
        for mine, others in zip(each[1], true[1], strict=False):
            assert mine[2] == others[2]
            assert all(abs(a - b) <= 1e-12 * max(1, abs(b)) for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_are_one_process(loss: str, optimizer: str) -> None:
    """Uneven micro-batches, uneven counts; weights, losses, norms and counts on every rank."""
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    assert_same(run_on_ranks(2, train, sizes, 2, loss, optimizer, {}), truth(sizes, 2, loss, optimizer))


@pytest.mark.parametrize(
    "sizes",
    [
        [[3, 5, 2], [6]],
        [[3], [6, 2, 2, 4, 1]],
        [[3, 2, 2], []],
        [[], [3, 4, 5, 1]],
        [[2], [3, 1], [], [4, 4, 4]],
    ],
    ids=str,
)
def test_ranks_with_other_numbers_of_micro_batches(sizes: list[list[int]]) -> None:
    """Some have fewer windows than others, and some none at all."""
    found = run_on_ranks(len(sizes), train, sizes, 2, "mean", "sgd", {})
    assert_same(found, truth(sizes, 2, "mean", "sgd"), all_updates=False)


@pytest.mark.parametrize(
    "ddp",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"init_sync": False},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_whatever_ddp_was_told(ddp: dict[str, Any]) -> None:
    """Its reducer has nothing to do."""
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    assert_same(run_on_ranks(2, train, sizes, 2, "mean", "adamw", ddp), truth(sizes, 2, "mean", "adamw"))

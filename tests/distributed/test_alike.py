"""Ranks that would add up unlike things: other parameters, other losses, other ratios. All are told, nobody steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options, counted
from bigbatch.errors import LossError, SeveralCounts, WindowError
from tests.support.rank_checks import refused, right, weights
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

WIDTH = 4


def square() -> Any:
    """Return a model whose layers have the same shapes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def sample(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and what they should become."""
    by = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, WIDTH, generator=by, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def steps_of(rank: int, network: Any, trained: list[nn.Parameter], between: Callable[[int], None]) -> list[Tensor]:
    """Make three updates; something happens before each."""
    accumulator = Accumulator(network, torch.optim.SGD(trained, lr=0.1), steps=1, group=dist.group.WORLD)
    for number in range(3):
        between(number)
        x, y = sample(3, 10 * number + rank)
        accumulator.backward(F.mse_loss(network(x), y))
    return weights(network)


def freezing(rank: int, which: list[int], since: int) -> Any:
    """Freeze a layer, each rank its own, in some window."""
    network = square()

    def between(number: int) -> None:
        if number == since:
            network[which[rank]].requires_grad_(False)

    return steps_of(rank, network, list(network.parameters()), between)


@pytest.mark.parametrize("since", [0, 2])
def test_ranks_that_freeze_other_parameters_are_told(since: int) -> None:
    """Also such of the same shape, and in the midst of training."""
    refused(run_on_ranks(2, freezing, [0, 2], since), WindowError, "train different parameters")


def test_ranks_that_freeze_the_same_go_on() -> None:
    """In the midst of training, too."""
    one, other = run_on_ranks(2, freezing, [2, 2], 1)
    right([other], one)


def ordered(rank: int) -> Any:
    """Give the optimizer the same parameters, on every rank in another order."""
    network = square()
    found = list(network.parameters())
    return steps_of(rank, network, found[2:] + found[:2] if rank else found, lambda _: None)


def test_ranks_that_have_parameters_in_another_order_are_told() -> None:
    """What is added up is the first with the first."""
    refused(
        run_on_ranks(2, ordered),
        WindowError,
        "began with different weights (those of rank 1 differ), or with the same in another order",
    )


def in_low_precision(rank: int, dtype: torch.dtype, size: int) -> Any:
    """Begin with other weights, whose norms are the same or infinite in the type that they have."""
    torch.manual_seed(rank)
    network = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(2)]).to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    accumulator = Accumulator(network, optimizer, steps=1, group=dist.group.WORLD)
    accumulator.backward(network(torch.ones(1, size, dtype=dtype)).float().pow(2).mean())


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 512), (torch.float16, 4096)], ids=["bf16", "fp16"])
def test_other_weights_are_told_in_low_precision(dtype: torch.dtype, size: int) -> None:
    """One number of them is found in float32."""
    refused(run_on_ranks(2, in_low_precision, dtype, size), WindowError, "began with different weights")


def with_a_part_of_its_own(rank: int) -> Any:
    """Begin with a frozen layer that every rank has drawn by itself."""
    network = square()
    torch.manual_seed(rank)
    network[0] = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    return steps_of(rank, network, list(network[2].parameters()), lambda _: None)


def with_a_packed_part(rank: int) -> Any:
    """Have frozen weights of 8 bits, as quantised ones are."""
    network = square()
    for name, dtype in (("bytes", torch.uint8), ("small", torch.float8_e4m3fn)):
        network.register_parameter(name, nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
    return steps_of(rank, network, list(network[0].parameters()), lambda _: None)[2:]


def test_weights_that_cannot_be_summed_are_left_out() -> None:
    """They are nobody's mistake."""
    one, other = run_on_ranks(2, with_a_packed_part)
    right([other], one)


def test_other_weights_that_nobody_trains_are_told() -> None:
    """Each rank would train for features of its own."""
    refused(run_on_ranks(2, with_a_part_of_its_own), WindowError, "began with different weights")


LOSSES: dict[str, Callable[[Any, Tensor, Tensor, int], Tensor]] = {
    "a factor": lambda network, x, y, _: F.mse_loss(network(x), y) * len(x),
    "a factor in advance": lambda network, x, y, _: F.mse_loss(network(x), y) * len(x),
    "a term": lambda network, x, y, rank: (F.l1_loss if rank else F.mse_loss)(network(x), y),
}


def losing(rank: int, name: str, big_step: bool) -> Any:
    """Make updates of a loss that is another on every rank, though it does not change on any."""
    network = square()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    x, y = sample(6 - 2 * rank, rank)

    def loss(net: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return LOSSES[name](net, batch[0], batch[1], rank)

    if big_step:
        options = Options(group=dist.group.WORLD, check=False)
        return BigStep(network, optimizer, loss, micro_batch_size=3 - rank, options=options)((x, y))
    counts = (lambda batch: batch[1].numel()) if "advance" in name else None
    accumulator = Accumulator(network, optimizer, steps=2, group=dist.group.WORLD, counts=counts)
    for batch in accumulator.over(list(zip(x.chunk(2), y.chunk(2), strict=True))):
        accumulator.backward(loss(network, batch))
    return None


@pytest.mark.parametrize("name", LOSSES)
def test_one_big_batch_has_one_loss_on_all_ranks(name: str) -> None:
    """As on one process, where another factor may be a count in disguise."""
    words = "have different losses: other terms, or other factors of them"
    found = run_on_ranks(2, losing, name, False)
    refused(found, LossError, words)
    refused(found, LossError, "accumulator.backward(loss, count=n)")


def test_one_big_batch_has_one_loss_in_big_step() -> None:
    """In its words."""
    found = run_on_ranks(2, losing, "a factor", True)
    refused(found, LossError, "other factors of them, MseLoss times 3 on rank 0, MseLoss")
    refused(found, LossError, "return counted(loss, n)")


COUNTS = [(50_000, 49_999), (100_000, 99_999)]  # what a shift by one leaves of long sequences


def close_ratios(rank: int, big_step: bool) -> Any:
    """Have two counts of nearly the same ratio on both ranks."""
    network = square()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def loss(net: Any, batch: Any) -> Tensor:
        out, (first, second) = net(batch[0]), COUNTS[rank]
        return counted(F.mse_loss(out, batch[1]), first) + counted(out.abs().mean(), second)

    batch = sample(1, rank)
    if big_step:
        BigStep(network, optimizer, loss, micro_batch_size=1, options=Options(group=dist.group.WORLD))(batch)
    else:
        Accumulator(network, optimizer, steps=1, group=dist.group.WORLD).backward(loss(network, batch))
    return weights(network)


def test_ratios_that_differ_by_little_are_others() -> None:
    """They would be a hundred-thousandth wrong."""
    refused(
        run_on_ranks(2, close_ratios, False), SeveralCounts, "the ratio of their counts is not the same on all ranks"
    )


def test_ratios_that_differ_by_little_are_counted_in_advance() -> None:
    """By BigStep, which has the whole batch."""
    network = square()
    totals = [sum(column) for column in zip(*COUNTS, strict=True)]
    true = []
    for rank, counts in enumerate(COUNTS):
        x, y = sample(1, rank)
        out = network(x)
        for value, count, total in zip((F.mse_loss(out, y), out.abs().mean()), counts, totals, strict=True):
            true.append(value * count / total)
    torch.stack(true).sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    for found in run_on_ranks(2, close_ratios, True):
        assert distance(found, weights(network)) <= 1e-12


# Loops that one rank has left.


def in_another_loop(rank: int) -> Any:
    """Have one rank leave its first epoch between two windows, and begin the second."""
    network = square()
    accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.1), steps=1, group=dist.group.WORLD)
    for epoch in range(2):
        for number in accumulator.over(range(3)):
            x, y = sample(3, 100 * epoch + 10 * number + rank)
            accumulator.backward(F.mse_loss(network(x), y))
            if (rank, epoch, number) == (1, 0, 0):
                break


def test_ranks_in_different_loops_are_told() -> None:
    """One epoch's window would be made with another's."""
    refused(run_on_ranks(2, in_another_loop), WindowError, "one has left its loop over `over`")

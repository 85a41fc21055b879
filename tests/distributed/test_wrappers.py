"""Several ranks, and what goes wrong with them: each is right to 1e-12, or an error says what it is on every rank."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, across, counted
from bigbatch.errors import BatchError, ConfigurationError, LossError, RankFailed, SeveralCounts, WindowError
from tests.support.rank_checks import SIZES, one_process, refused, right, weights
from tests.support.rank_loops import (
    CLASSES,
    OPTIMIZERS,
    Batch,
    batches_of,
    mean,
    micro_batch,
    model,
    two_counts,
    two_heads,
    windows_of,
)
from tests.support.rank_norms import Normalised, Plain, made
from tests.support.rank_shards import shards
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks


# DDP is kept quiet as long as anyone wants it, and as it was afterwards.


def made_twice(rank: int, steps: int) -> Any:
    """Replace an object by another of the same name; the first one is gone only then."""
    network = DistributedDataParallel(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    step: Any = None
    for _ in range(2):
        if steps == 1:
            step = BigStep(network, optimizer, mean, micro_batch_size=2)
        else:
            step = Accumulator(network, optimizer, steps=steps)
    gc.collect()
    for batch in batches_of(rank, SIZES):
        if steps == 1:
            step(batch)
        else:
            step.backward(mean(network, batch))
    return weights(network)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_second_of_one_name(steps: int) -> None:
    """The first one's end does not have DDP reduce again."""
    right(run_on_ranks(2, made_twice, steps), one_process(steps))


def one_after_the_other(_: int) -> Any:
    """Look at DDP's flag after each end."""
    network = DistributedDataParallel(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    both = [Accumulator(network, optimizer, steps=2), Accumulator(network, optimizer, steps=2)]
    flags = []
    while both:
        both.pop(0)
        gc.collect()
        flags.append(network.require_backward_grad_sync)
    return flags


def test_ddp_is_as_it_was_after_the_last() -> None:
    """And not before."""
    assert run_on_ranks(2, one_after_the_other) == [[False, True]] * 2


# DDP's own reduction, where it does not happen.


def under_no_sync(rank: int) -> Any:
    """Have the user's loop keep DDP quiet."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        with network.no_sync():
            accumulator.backward(mean(network, batch))


def past_the_wrapper(rank: int) -> Any:
    """Call the module inside."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network.module, batch))


def with_an_unused_layer(rank: int) -> Any:
    """Have a layer that no micro-batch uses: its bucket is never full."""
    network = DistributedDataParallel(two_heads())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    for x, y in batches_of(rank, SIZES):
        accumulator.backward(F.cross_entropy(network(x, 0), y))


def frozen_afterwards(rank: int) -> Any:
    """Freeze what DDP waits for."""
    network = DistributedDataParallel(model())
    next(network.parameters()).requires_grad_(False)
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    for batch in batches_of(rank, SIZES):
        accumulator.backward(mean(network, batch))


@pytest.mark.parametrize("work", [under_no_sync, past_the_wrapper, with_an_unused_layer, frozen_afterwards])
def test_what_ddp_has_not_reduced_is_not_stepped_with(work: Any) -> None:
    """The ranks would go apart."""
    refused(run_on_ranks(2, work), LossError, "DDP has not reduced all")


def flushed(rank: int) -> Any:
    """End each window by hand, before DDP reduces."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=3, overlap=True)
    for number, batch in enumerate(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))
        if number % 2:
            accumulator.flush()
    return weights(network)


def test_windows_that_end_early_are_reduced_all_the_same() -> None:
    """Not by DDP."""
    right(run_on_ranks(2, flushed), one_process(2))


# Low precision, where gradients of all ranks are added up in backward.


def low_loss(rank: int, sharded: bool) -> Any:
    """Compute a loss of bf16."""
    network = shards(model().float()) if sharded else DistributedDataParallel(model().float())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=2, overlap=not sharded)
    for x, y in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(F.cross_entropy(network(x.float()), y).bfloat16())


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loss_whose_weight_would_be_rounded_is_refused(sharded: bool) -> None:
    """Ranks' residuals differ, and there is one sum."""
    refused(run_on_ranks(2, low_loss, sharded), LossError, "logits.float()")


# What ranks must have in common.


def of_other_seeds(rank: int) -> Any:
    """Begin with other weights, without a wrapper that would send them."""
    torch.manual_seed(rank)
    network = nn.Linear(5, 4).double()
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, group=dist.group.WORLD)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))


def frozen_on_one(rank: int) -> Any:
    """Train other parameters on each rank."""
    network = model()
    next(network.parameters()).requires_grad_(rank == 0)
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, group=dist.group.WORLD)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))


def two_players(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train two models in turn, one `over` inside the other."""
    torch.manual_seed(0)
    one = DistributedDataParallel(nn.Linear(5, 5).double())
    two = DistributedDataParallel(nn.Linear(5, 4).double())
    first = Accumulator(one, OPTIMIZERS["sgd"](one.parameters()), steps=2)
    second = Accumulator(two, OPTIMIZERS["sgd"](two.parameters()), steps=2)
    for x, y in first.over(second.over(batches_of(rank, sizes))):
        made = one(x)
        first.backward(F.cross_entropy(two(made), y))
        second.backward(F.cross_entropy(two(made.detach()), y))
    return [*weights(one), *weights(two)]


def with_fewer_batches_for_two(rank: int) -> Any:
    """Have a rank whose two accumulators end before those of the other."""
    return two_players(rank, [[3, 5, 2, 4, 1], [6]])


def failed_in_a_hook(rank: int) -> Any:
    """Go on after a step that one rank alone has not made."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    fails = [rank == 1]

    def hook() -> None:
        if fails.pop():
            raise ValueError("mine")
        fails.append(False)

    accumulator.before_step(hook)
    one, other, *_ = batches_of(rank, SIZES)
    try:
        accumulator.backward(mean(network, one))
    except ValueError:
        fails.append(False)
        accumulator.discard()
    accumulator.backward(mean(network, other))


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (of_other_seeds, "began with different weights"),
        (frozen_on_one, "different parameters"),
        (with_fewer_batches_for_two, "as many batches where one"),
        (failed_in_a_hook, "different numbers of windows"),
    ],
)
def test_ranks_that_have_nothing_in_common_are_refused(work: Any, words: str) -> None:
    """They would go apart, or wait for each other for ever."""
    refused(run_on_ranks(2, work), WindowError, words)


def test_two_players_with_as_many_batches() -> None:
    """Their windows come in the same order."""
    one, other = run_on_ranks(2, two_players, SIZES)
    right([other], one)


def of_two(rank: int) -> Any:
    """Train on two of three ranks."""
    group = dist.new_group([0, 2])
    network = model()
    try:
        accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, group=group)
    except ConfigurationError as error:
        return str(error)
    for batch in accumulator.over(batches_of(rank // 2, SIZES)):
        accumulator.backward(mean(network, batch))
    return weights(network)


def test_a_group_is_for_its_members() -> None:
    """Others are told that they are none."""
    first, other, last = run_on_ranks(3, of_two)
    right([first, last], one_process(2))
    assert "not in the group" in other


# Several counts.


def nothing_on_one(rank: int) -> Any:
    """Have two counts in constant ratio, and a rank that counts nothing."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    x, _ = micro_batch(3, 0)
    out = network(x)
    number = 0 if rank else 3
    accumulator.backward(counted(out.pow(2).mean(), number) + counted(out.abs().mean(), 2 * number))
    return weights(network)


def test_a_rank_that_counts_nothing_has_no_ratio() -> None:
    """It is the other's update."""
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    out = network(micro_batch(3, 0)[0])
    (out.pow(2).mean() + out.abs().mean()).backward()
    optimizer.step()
    right(run_on_ranks(2, nothing_on_one), weights(network))


def out_of_ratio(rank: int, where: Sequence[int]) -> Any:
    """Find out at the end that counts on a device have not kept their ratio, on some ranks."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    window: Any = None

    def losing(batch: Batch) -> Tensor:
        loss = mean(network, batch)
        ledger = window.ledger
        ledger.in_ratio = torch.tensor(rank not in where)  # as it would be there
        return loss

    accumulator.steps = 2
    accumulator.backward(mean(network, micro_batch(3, rank)))
    window = accumulator._window
    accumulator.backward(losing(micro_batch(4, rank)))


@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_a_lost_ratio_is_refused(where: tuple[int, ...]) -> None:
    """Also by the ranks that have lost it themselves."""
    refused(run_on_ranks(2, out_of_ratio, where), SeveralCounts, "counts=lambda batch")


# Sharded models.


def averaging_again(rank: int) -> Any:
    """Take a gradient by hand when two accumulators are gone, the first of them replaced."""
    network = shards(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=1)
    accumulator = Accumulator(network, optimizer, steps=1)
    gc.collect()
    accumulator.backward(mean(network, micro_batch(3, 0)))
    del accumulator
    gc.collect()
    mean(network, micro_batch(4, rank)).backward()
    every: list[Any] = list(network.parameters())
    return [p.full_tensor().detach() for p in every], [p.grad.full_tensor() for p in every]


def test_shards_average_again() -> None:
    """As they do by default, when nobody here needs them any more."""
    network = model()
    found = run_on_ranks(2, averaging_again)
    true: list[Tensor] = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        for p, value in zip(network.parameters(), each[0], strict=True):
            p.data = value
        parts = [
            torch.autograd.grad(mean(network, micro_batch(4, rank)), list(network.parameters())) for rank in (0, 1)
        ]
        true = [(one + other) / 2 for one, other in zip(*parts, strict=True)]
        assert distance(each[1], true) <= 1e-12


def counted_shards(rank: int) -> Any:
    """Count in advance, with fewer batches on one rank."""
    network = shards(model())

    def counts(batch: Batch) -> tuple[Tensor, int]:
        return (batch[1] != -100).sum(), len(batch[1]) * CLASSES

    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, counts=counts)
    for batch in accumulator.over(batches_of(rank, [[3, 5, 2], [6]])):
        accumulator.backward(two_counts(network, batch))


def test_windows_counted_in_advance_have_as_many_passes() -> None:
    """Or no rank begins."""
    refused(run_on_ranks(2, counted_shards), BatchError, "1 to 2 micro-batches")


def no_samples(rank: int) -> Any:
    """Have nothing to pass by with."""
    network = shards(model())
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), mean, micro_batch_size=3)
    step(None if rank else micro_batch(3, rank))


def test_a_rank_without_samples_ends_the_step_of_all() -> None:
    """The others hear of it at once."""
    one, other = run_on_ranks(2, no_samples)
    assert isinstance(one, RankFailed), one
    assert isinstance(other, BatchError), other


def early(rank: int, end: str) -> Any:
    """End a window before its last backward, which alone would have reduced."""
    plain = model()
    network = shards(plain, list(plain.children())[::2])
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    first, *_, third, fourth = batches_of(rank, SIZES)
    accumulator.backward(mean(network, first))
    if end == "flush":
        accumulator.flush()
    accumulator.discard()
    accumulator.backward(mean(network, third))
    accumulator.backward(mean(network, fourth))
    every: list[Any] = list(network.parameters())
    return [p.full_tensor().detach() for p in every]


def test_shards_whose_window_ends_early_are_not_stepped_with() -> None:
    """They were never reduced."""
    refused(run_on_ranks(2, early, "flush"), WindowError, "ends before its last micro-batch")


def test_nothing_is_left_in_shards_of_a_window_that_is_dropped() -> None:
    """Gradients that they keep whole do not go into the next."""
    network = model()
    window = windows_of(SIZES, 2)[1]
    mean(network, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
    OPTIMIZERS["sgd"](network.parameters()).step()
    right(run_on_ranks(2, early, "discard"), weights(network))


def of_nothing(rank: int) -> Any:
    """Divide by a count of zero on one rank: 0 / 0 stands in the gradient, too."""
    network = shards(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    values = network(micro_batch(3, rank)[0]).pow(2).mean(1)
    mask = torch.zeros_like(values) if rank else torch.ones_like(values)
    accumulator.backward((values * mask).sum() / mask.sum(), count=mask.sum())
    every: list[Any] = list(network.parameters())
    return [bool(p.full_tensor().isfinite().all()) for p in every]


def test_a_mean_over_nothing_adds_nothing_to_shards() -> None:
    """As it adds nothing to replicas, which leave its backward out."""
    assert run_on_ranks(2, of_nothing) == [[True] * 4] * 2


# Coupled samples.


def spread_and_more(network: Any, batch: Batch) -> Tensor:
    """Two means over different things, and a term of parameters alone."""
    out = network(batch[0])
    weight = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
    spread = (out - across.mean(out.mean(0))).pow(2).mean()
    return spread + F.cross_entropy(out, batch[1]) + 0.1 * counted(weight, "once")


def of_values_that_one_rank_has(network: Any, batch: Batch) -> Tensor:
    """Normalise samples of one class alone: a rank may have none."""
    inner = network.module if isinstance(network, DistributedDataParallel) else network
    hidden = inner.one(batch[0])
    chosen = inner.two(inner.norm(hidden[batch[1] == 0]))
    return counted(chosen.pow(2).sum(), "sum") + counted(inner.two(hidden).pow(2).sum(), "sum")


def coupled(rank: int, loss: Any, kind: type[Normalised], sizes: Sequence[Sequence[int]]) -> Any:
    """Make each batch of this rank a part of a big one."""
    network: nn.Module = made(kind)
    if len(sizes) > 1:
        network = DistributedDataParallel(network, find_unused_parameters=True)
    step = BigStep(network, torch.optim.SGD(network.parameters(), lr=0.1), loss, micro_batch_size=2)
    for number, size in enumerate(sizes[rank]):
        step(micro_batch(size, 100 * rank + number))
    return weights(network)


def coupled_truth(loss: Any, kind: type[Normalised], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Make each big batch at once."""
    network = made(kind)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for number in range(len(sizes[0])):
        parts = [micro_batch(own[number], 100 * rank + number) for rank, own in enumerate(sizes)]
        optimizer.zero_grad()
        loss(network, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))).backward()
        optimizer.step()
    return weights(network)


@pytest.mark.parametrize("sizes", [[[3, 5, 4], [7, 4, 2]], [[10, 9, 6]]], ids=str)
def test_a_term_that_counts_once_does_so_beside_two_counts(sizes: list[list[int]]) -> None:
    """Also where some micro-batches have the whole batch's ratio of counts, and others do not; on one rank, too."""
    arguments = (spread_and_more, Plain, sizes)
    found = run_on_ranks(2, coupled, *arguments) if len(sizes) > 1 else [coupled(0, *arguments)]
    right(found, coupled_truth(*arguments))


def test_a_rank_that_has_no_values_for_a_norm() -> None:
    """The others' statistics are those of all."""
    sizes = [[8], [1]]
    arguments = (of_values_that_one_rank_has, Normalised, sizes)
    right(run_on_ranks(2, coupled, *arguments), coupled_truth(*arguments))


def summed_in_low_precision(rank: int) -> Any:
    """Share a sum of bf16 that one rank has one part of, and the other three."""

    def loss(network: Any, batch: Batch) -> Tensor:
        out = network(batch[0])
        return (out.float() - across.sum(out.sum(0)).float() / 100).pow(2).mean()

    network = DistributedDataParallel(made(Plain).bfloat16(), find_unused_parameters=True)
    step = BigStep(network, torch.optim.SGD(network.parameters(), lr=0.1), loss, micro_batch_size=2)
    x, y = micro_batch(2 + 4 * rank, rank)
    step((x.bfloat16(), y))
    return weights(network)


def test_sums_of_low_precision_cross_the_wire_alike() -> None:
    """Whatever number of micro-batches a rank has."""
    one, other = run_on_ranks(2, summed_in_low_precision)
    right([[p.double() for p in other]], [p.double() for p in one])


def without_samples_in_company(rank: int) -> Any:
    """Have no part in a batch whose samples are coupled."""
    network = DistributedDataParallel(made(Normalised), find_unused_parameters=True)
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), mean, micro_batch_size=2)
    step(None if rank else micro_batch(4, rank))


def test_coupled_samples_need_every_rank() -> None:
    """All say so, and none waits."""
    refused(run_on_ranks(2, without_samples_in_company, limit=15), WindowError, "coupled")


# A group of one process, as `torchrun --nproc-per-node 1` makes it.


def as_one_of_one(rank: int) -> Any:
    """Train with DDP and without: bf16 parameters, and such that only some micro-batches use."""
    found = []
    for wrapped in (True, False):
        plain = two_heads().bfloat16()
        network: Any = DistributedDataParallel(plain) if wrapped else plain
        optimizer = OPTIMIZERS["adamw"](network.parameters())
        accumulator = Accumulator(network, optimizer, steps=2)
        for number, (x, y) in enumerate(accumulator.over(batches_of(rank, SIZES))):
            accumulator.backward(F.cross_entropy(network(x.bfloat16(), number % 2).float(), y))
        del accumulator
        step = BigStep(
            network,
            optimizer,
            lambda net, batch: F.cross_entropy(net(batch[0].bfloat16(), 0).float(), batch[1]),
            micro_batch_size=2,
        )
        step(batches_of(rank, SIZES)[0])
        found.append(weights(plain))
    return found


def test_ddp_of_one_process_is_kept_quiet_too() -> None:
    """What goes on two ranks goes on one: DDP would refuse float32 sums, and parameters without a gradient."""
    (found,) = run_on_ranks(1, as_one_of_one)
    assert isinstance(found, list), found
    right([found[0]], found[1])

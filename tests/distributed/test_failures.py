"""What one rank cannot go on with: the others hear of it, in time and in words, or all begin the window anew."""

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from bigbatch import Accumulator, BigStep, Options, across
from bigbatch.distributed.ranks import naming_lost_ranks
from bigbatch.distributed.reduction import Replicas
from bigbatch.errors import RankFailed
from tests.support.rank_loops import (
    OPTIMIZERS,
    SIZES,
    Batch,
    batches_of,
    heard,
    made,
    mean,
    micro_batch,
    model,
    raising,
    sgd,
    shards,
    train,
    two_counts,
    two_heads,
    weights,
)
from tests.support.rank_norms import CASES as COUPLED
from tests.support.rank_norms import Normalised
from tests.support.rank_norms import made as coupled
from tests.support.ranks import exactly, run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

LIMIT = 18.0  # seconds: gloo gives up after 20, and a rank that fails should not wait for that
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")


def in_training(rank: int, fail: Callable[[], object], wrap: Callable[[Any], nn.Module] = Ddp) -> None:
    """Fail on the second rank, in the second micro-batch of the second of two big steps."""
    network, calls = wrap(model()), 0

    def loss_fn(network: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if rank and calls >= 5:
            fail()
        return mean(network, batch)

    step = BigStep(network, sgd(network), loss_fn, micro_batch_size=2)
    for number in range(2):
        step(micro_batch(6, rank + number))


def several(rank: int) -> None:
    """Have two counts that lose their ratio on one rank alone, inside of a sharded model."""
    network = shards(model())
    step = BigStep(network, sgd(network), two_counts, micro_batch_size=2)
    for number in range(2):
        x, y = micro_batch(6, rank + number)
        y = y.clamp(min=0)
        y[3] = -100 if rank and number else y[3]
        step((x, y))


def adding_up(rank: int) -> None:
    """Run out of memory on one rank when gradients are added up."""
    plain = Replicas.reduce

    def reduce(self: Replicas, *given: Any) -> Any:
        return raising(MEMORY) if rank and self.windows else plain(self, *given)

    with patch.object(Replicas, "reduce", reduce):
        in_training(rank, lambda: None)


def in_a_norm(rank: int) -> None:
    """Run out of memory on one rank, in the model between two norms."""
    kind, loss_of = COUPLED["batch norm"]
    network = Ddp(coupled(kind), find_unused_parameters=True)
    step = BigStep(network, sgd(network), loss_of, micro_batch_size=2)
    step(micro_batch(4, rank))
    if rank:
        network.module.norm.register_forward_hook(lambda *_: raising(MEMORY))
    step(micro_batch(4, 10 + rank))


def without_samples(rank: int, network: nn.Module, batch: Batch | None = None) -> None:
    """Have none on one rank, or an empty batch."""
    step = BigStep(network, sgd(network), mean, micro_batch_size=3)
    step(batch or (None if rank else micro_batch(3, rank)))


def normed() -> nn.Module:
    """Return a model with BatchNorm."""
    return Ddp(coupled(Normalised), find_unused_parameters=True)


def other_totals(rank: int) -> None:
    """Count something else in advance than the loss does, on one rank."""
    counts: Any = lambda batch: ((batch[1] != -100).sum() + rank, 4 * len(batch[1]))  # noqa: E731
    train(rank, model(), two_counts, [[3], [3]], steps=1, group=dist.group.WORLD, counts=counts)


def broken(rank: int) -> None:
    """Close a window whose backward has failed, on one rank."""
    network = Ddp(model())
    accumulator = made(network)
    batch = micro_batch(3, rank)
    accumulator.backward(mean(network, batch))
    if rank:
        loss = mean(network, batch)
        loss.register_hook(lambda _: raising(ValueError("mine")))
        assert heard(accumulator.backward, loss) == "ValueError: mine"
    accumulator.flush()


def breaking(rank: int) -> None:
    """Leave the loop early on one rank, and make an update of what there is."""
    network = Ddp(model())
    accumulator = made(network)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))
        if rank:
            break
    accumulator.flush()


def without_the_last(rank: int) -> None:
    """Pass over the last batch on one rank, where DDP reduces."""
    network = Ddp(model())
    accumulator = made(network, overlap=True)
    for number, batch in enumerate(accumulator.over(batches_of(rank, SIZES))):
        if number < 3 or not rank:
            accumulator.backward(mean(network, batch))


def attacked(rank: int, size: int) -> None:
    """Be trained on what the model likes least: a derivative inside of a loss goes through the norms of all."""

    def loss(net: Any, batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), batch[1]), x)
        return F.cross_entropy(net(batch[0] + 0.1 * slope.sign()), batch[1])

    network = normed()
    BigStep(network, sgd(network), loss, micro_batch_size=size)(micro_batch((3, 6)[rank], rank))


GONE = "RuntimeError|RankFailed"
TOLD = "RankFailed: rank 1 failed in this window"
FAILURES: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "raises": (lambda rank: in_training(rank, partial(raising, ValueError("mine"))), TOLD, "ValueError: mine"),
    "memory": (lambda rank: in_training(rank, partial(raising, MEMORY)), TOLD, "OutOfMemory: "),
    "memory in shards": (
        lambda rank: in_training(rank, partial(raising, MEMORY), shards),
        GONE,
        "OutOfMemory: ",
    ),
    "several counts in shards": (several, GONE, "SeveralCounts: "),
    "adding up": (adding_up, GONE, "OutOfMemory: .*cannot try again alone"),
    "memory in a norm": (in_a_norm, "RankFailed: .*in that rank's own output", "OutOfMemory: .*cannot try again alone"),
    "no samples for shards": (lambda rank: without_samples(rank, shards(model())), TOLD, "BatchError: "),
    "no samples for norms": (
        lambda rank: without_samples(rank, normed()),
        "WindowError: .*different places",
        "WindowError: this rank has no samples in this update, and samples are coupled",
    ),
    "an empty batch": (
        lambda rank: without_samples(rank, Ddp(model()), micro_batch(3 - 3 * rank, rank)),
        TOLD,
        r"BatchError: .*calls step\(None\)",
    ),
    "other totals": (other_totals, TOLD, "SeveralCounts: "),
    "a broken window": (broken, TOLD, "WindowBroken: "),
    "break": (breaking, GONE, "WindowError: .*Break on all ranks in the same window"),
    "no backward of the last batch": (without_the_last, GONE, "WindowError: .*leave batches out before"),
    "attacked": (
        lambda rank: attacked(rank, 2),
        "LossError|RankFailed",
        "LossError: .*inside of the loss goes through",
    ),
    "attacked at once": (lambda rank: attacked(rank, 8), "LossError: .*inside of the loss goes through", "LossError|"),
}


def failing(rank: int, name: str) -> None:
    """Run one of them; it fails as a process of one's own would."""
    FAILURES[name][0](rank)


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails_raises_its_own_error_and_the_others_end(name: str) -> None:
    """They hear of it where they can, and from torch when its process ends where they wait inside of something."""
    _, *expected = FAILURES[name]
    for error, words in zip(run_on_ranks(2, failing, name, limit=LIMIT), expected, strict=True):
        text = " ".join(f"{type(error).__name__}: {error}".split())
        assert re.match(words, text), text


# All go on.


def failing_once(rank: int) -> list[str]:
    """Have the optimizer fail on one rank in the second of three windows, of a model that has buffers; all go on."""
    network, fails = Ddp(two_heads(), find_unused_parameters=True), [False]
    optimizer = sgd(network)
    accumulator = Accumulator(network, optimizer, steps=1, clip_norm=1.0)
    optimizer.register_step_pre_hook(lambda *_: raising(ValueError("mine")) if fails[0] else None)
    found = []
    for number in range(3):
        fails[0] = (rank, number) == (1, 1)
        x, y = micro_batch(4, number + rank)
        found.append(heard(accumulator.backward, F.cross_entropy(network(x, 0), y)))
        accumulator.discard()
    return found


def test_an_optimizer_that_fails_leaves_nobody_waiting_for_buffers() -> None:
    """They were sent before; that the ranks have parted is said in the next window."""
    one, other = exactly(2, failing_once, limit=LIMIT)
    assert (one[:2], other[:2]) == (["", ""], ["", "ValueError: mine"])
    assert all("windows made: 2 on rank 0, 1 on rank 1" in words for words in (one[2], other[2]))


def behind_the_last(rank: int, fails: bool) -> Any:
    """Run out of memory once on one rank, in the last of a window's backwards."""
    network, calls = Ddp(model()), [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return raising(MEMORY) if rank and fails and calls[0] == 4 else gradient  # type: ignore[func-returns-value, return-value]

    optimizer, options = OPTIMIZERS["sgd"](network.parameters()), Options(check=False)
    step = BigStep(network, optimizer, COUPLED["spread"][1], micro_batch_size=4, options=options)
    next(network.parameters()).register_hook(hook)
    for number in range(3):
        step(micro_batch(8, 10 * number + rank))
    return weights(network), calls[0]


def test_out_of_memory_after_the_last_meeting() -> None:
    """Others are at their statements, and begin the window anew with it: to the same weights."""
    true, again = exactly(2, behind_the_last, False), exactly(2, behind_the_last, True)
    for (found, more), (expected, calls) in zip(again, true, strict=True):
        assert more > calls
        assert distance(found, expected) <= 1e-12


@pytest.mark.parametrize("error", [RuntimeError("[gloo/pair.cc:1] closed by peer"), dist.DistError(), RankFailed()])
def test_a_lost_connection_is_named(error: Exception) -> None:
    """Whatever torch calls it, and once."""
    with pytest.raises(RankFailed) as raised, naming_lost_ranks():
        raise error
    assert raised.value is error or raised.value.__cause__ is error
    with pytest.raises(RuntimeError, match="mine"), naming_lost_ranks():
        raise RuntimeError("mine")


# Nothing is left behind.


def after_a_refusal(rank: int) -> list[str]:
    """Reach other shards on each rank, drop that window, and make one of the same."""
    network: Any = shards(two_heads())
    accumulator = made(network, steps=1)
    found = []
    for head in (rank, 0):
        x, y = micro_batch(4, rank)
        found.append(heard(accumulator.backward, F.cross_entropy(network(x, head), y)).partition(":")[0])
        accumulator.discard()
    return found


def test_what_a_dropped_window_has_reached_is_not_compared_again() -> None:
    """The next one is made."""
    assert exactly(2, after_a_refusal) == [["WindowError", ""]] * 2


def refused_without_samples(rank: int, hook: bool) -> Any:
    """Have an update without samples be refused, or fail in a hook; then step by hand."""
    network = model()
    optimizer = sgd(network, lr=0.1 if hook else 0.1 + rank)
    step = BigStep(network, optimizer, mean, micro_batch_size=2, options=Options(group=dist.group.WORLD))
    if rank and hook:
        step.before_step(partial(raising, ValueError("mine")))
    said = heard(step, None if rank else micro_batch(4, 0))
    return said.partition(":")[0], sum(p.grad is not None for p in network.parameters()), heard(optimizer.step)


@pytest.mark.parametrize(("hook", "errors"), [(False, ["ConfigurationError"] * 2), (True, ["", "ValueError"])])
def test_an_update_without_samples_leaves_nothing_behind(hook: bool, errors: list[str]) -> None:
    """Neither gradients nor a window."""
    assert exactly(2, refused_without_samples, hook) == [(error, 0, "") for error in errors]


def kept_quiet(_: int) -> Any:
    """Look at DDP's flag as one accumulator ends after the other."""
    network, flags = Ddp(model()), []
    both = [made(network), made(network)]
    while both:
        both.pop(0)
        gc.collect()
        flags.append(network.require_backward_grad_sync)
    return flags


def test_ddp_is_as_it_was_after_the_last() -> None:
    """And not before."""
    assert exactly(2, kept_quiet) == [[False, True]] * 2


def averaging_again(rank: int, replicas: bool) -> Any:
    """Have an object refused, and two make an update; then take a gradient by hand when they are gone."""
    network = shards(model(), shape=(2, 2) if replicas else None)
    assert "must be" in heard(lambda: BigStep(network, sgd(network), mean, micro_batch_size=0))
    accumulator = made(network, steps=1)
    accumulator = made(network, steps=1)
    gc.collect()
    accumulator.backward(mean(network, micro_batch(3, 0)))
    del accumulator
    gc.collect()
    mean(network, micro_batch(4, rank)).backward()
    every: list[Any] = list(network.parameters())
    return weights(network), [p.grad.full_tensor() for p in every]


@pytest.mark.parametrize("replicas", [False, True])
def test_shards_average_again(replicas: bool) -> None:
    """As they do by default, over all ranks, when nobody here needs them any more."""
    ranks, network = 4 if replicas else 2, model()
    for each, gradients in exactly(ranks, averaging_again, replicas):
        for p, value in zip(network.parameters(), each, strict=True):
            p.data, p.grad = value, None
        torch.stack([mean(network, micro_batch(4, rank)) for rank in range(ranks)]).mean().backward()
        assert distance(gradients, [p.grad for p in network.parameters() if p.grad is not None]) <= 1e-12


def broadcasts(rank: int, wanted: bool, overlap: bool) -> int:
    """Count how often buffers are sent."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().eval()
    network: Any = Ddp(plain)
    network.broadcast_buffers = wanted
    with patch.object(network, "_sync_buffers", wraps=network._sync_buffers) as sent:
        train(rank, network, steps=1, overlap=overlap)
        if not overlap:  # ranks may have other numbers of micro-batches then
            step = BigStep(network, sgd(network), mean, micro_batch_size=2)
            for number in range(4):
                step(micro_batch(4 + 2 * rank, number))
    return sent.call_count


@pytest.mark.parametrize(("wanted", "overlap"), [(True, True), (True, False), (False, True)])
def test_buffers_are_sent_once_per_update(wanted: bool, overlap: bool) -> None:
    """Also where DDP reduces, whose forward would send them, too; and never where DDP would not."""
    assert exactly(2, broadcasts, wanted, overlap) == [(4 if overlap else 8) * wanted] * 2


def summed_in_low_precision(rank: int) -> Any:
    """Share a sum of bf16 that one rank has one part of, and the other three."""

    def loss(network: Any, batch: Batch) -> Tensor:
        out = network(batch[0].bfloat16())
        return (out.float() - across.sum(out.sum(0)).float() / 100).pow(2).mean()

    network = Ddp(model().bfloat16())
    BigStep(network, sgd(network), loss, micro_batch_size=2)(micro_batch(2 + 4 * rank, rank))
    return weights(network)


def test_sums_of_low_precision_cross_the_wire_alike() -> None:
    """Whatever number of micro-batches a rank has."""
    one, other = exactly(2, summed_in_low_precision)
    assert distance(other, one) == 0

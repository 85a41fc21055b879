"""What one rank cannot go on with: the others hear of it, in time and in words, or all begin the window anew."""

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast
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
from tests.faults import rank_faults
from tests.faults.outcomes import Case, Outcome
from tests.support import rank_loops as loops
from tests.support import rank_norms as norms
from tests.support.rank_loops import heard, made, mean, micro_batch, model, raising, sgd, shards, two_heads, weights
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

LIMIT = 18.0  # seconds: gloo gives up after 20, and a rank that fails should not wait for that
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")
FAILURES: dict[str, tuple[Callable[[int], Any], str, str]] = {}


def fails(name: str, others: str, own: str) -> Callable[[Callable[[int], Any]], None]:
    """Put a program in the table, with what the first rank raises in it, and what the second, which fails."""
    return lambda program: FAILURES.update({name: (program, others, own)})


GONE = "RuntimeError|RankFailed"
TOLD = "RankFailed: rank 1 failed in this window"
ALONE = "OutOfMemory: .*cannot try again alone"


def in_training(rank: int, error: BaseException | None, wrap: Callable[[Any], nn.Module] = Ddp) -> None:
    """Fail on the second rank, in the second micro-batch of the second of two big steps."""
    network, calls = wrap(model()), 0

    def loss_fn(network: nn.Module, batch: loops.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if rank and calls >= 5 and error is not None:
            raise error
        return mean(network, batch)

    step = BigStep(network, sgd(network), loss_fn, micro_batch_size=2)
    for number in range(2):
        step(micro_batch(6, rank + number))


@fails("several counts in shards", GONE, "SeveralCounts: ")
def _(rank: int) -> None:
    network = shards(model())
    step = BigStep(network, sgd(network), loops.two_counts, micro_batch_size=2)
    for number in range(2):
        x, y = micro_batch(6, rank + number)
        y = y.clamp(min=0)
        y[3] = -100 if rank and number else y[3]  # their ratio is lost on one rank alone
        step((x, y))


@fails("adding up", GONE, ALONE)
def _(rank: int) -> None:
    plain = Replicas.reduce

    def reduce(self: Replicas, *given: Any) -> Any:
        return raising(MEMORY) if rank and self.windows else plain(self, *given)

    with patch.object(Replicas, "reduce", reduce):
        in_training(rank, None)


@fails("memory in a norm", "RankFailed: .*in that rank's own output", ALONE)
def _(rank: int) -> None:
    kind, loss_of = norms.CASES["batch norm"]
    network = Ddp(norms.made(kind), find_unused_parameters=True)
    step = BigStep(network, sgd(network), loss_of, micro_batch_size=2)
    step(micro_batch(4, rank))
    if rank:
        network.module.norm.register_forward_hook(lambda *_: raising(MEMORY))
    step(micro_batch(4, 10 + rank))


def without_samples(rank: int, network: nn.Module, batch: loops.Batch | None = None) -> None:
    """Have none on one rank, or an empty batch."""
    step = BigStep(network, sgd(network), mean, micro_batch_size=3)
    step(batch or (None if rank else micro_batch(3, rank)))


def normed() -> nn.Module:
    """Return a model with BatchNorm."""
    return Ddp(norms.made(norms.Normalised), find_unused_parameters=True)


@fails("other totals", TOLD, "SeveralCounts: ")
def _(rank: int) -> None:
    counts: Any = lambda batch: ((batch[1] != -100).sum() + rank, 4 * len(batch[1]))  # noqa: E731
    group = dist.group.WORLD
    loops.train(rank, model(), loops.two_counts, [[3], [3]], steps=1, group=group, counts=counts)


@fails("a broken window", TOLD, "WindowBroken: ")
def _(rank: int) -> None:
    network = Ddp(model())
    accumulator = made(network)
    batch = micro_batch(3, rank)
    accumulator.backward(mean(network, batch))
    if rank:
        loss = mean(network, batch)
        loss.register_hook(lambda _: raising(ValueError("mine")))
        assert heard(accumulator.backward, loss) == "ValueError: mine"
    accumulator.flush()


@fails("break", GONE, "WindowError: .*Break on all ranks in the same window")
def _(rank: int) -> None:
    network = Ddp(model())
    accumulator = made(network)
    for batch in accumulator.over(loops.batches_of(rank, loops.SIZES)):
        accumulator.backward(mean(network, batch))
        if rank:
            break
    accumulator.flush()


@fails("no backward of the last batch", GONE, "WindowError: .*leave batches out before")
def _(rank: int) -> None:
    network = Ddp(model())
    accumulator = made(network, overlap=True)
    for number, batch in enumerate(accumulator.over(loops.batches_of(rank, loops.SIZES))):
        if number < 3 or not rank:
            accumulator.backward(mean(network, batch))


def attacked(rank: int, size: int) -> None:
    """Be trained on what the model likes least: a derivative inside of a loss goes through the norms of all."""

    def loss(net: Any, batch: loops.Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), batch[1]), x)
        return F.cross_entropy(net(batch[0] + 0.1 * slope.sign()), batch[1])

    network = normed()
    BigStep(network, sgd(network), loss, micro_batch_size=size)(micro_batch((3, 6)[rank], rank))


INSIDE = "LossError: .*inside of the loss goes through"
COUPLED = "WindowError: this rank has no samples in this update, and samples are coupled"
EMPTY = r"BatchError: .*calls step\(None\)"
FAILURES |= {
    "raises": (lambda rank: in_training(rank, ValueError("mine")), TOLD, "ValueError: mine"),
    "memory": (lambda rank: in_training(rank, MEMORY), TOLD, "OutOfMemory: "),
    "memory in shards": (lambda rank: in_training(rank, MEMORY, shards), GONE, "OutOfMemory: "),
    "no samples for shards": (lambda rank: without_samples(rank, shards(model())), TOLD, "BatchError: "),
    "no samples for norms": (lambda rank: without_samples(rank, normed()), "WindowError: .*different places", COUPLED),
    "an empty batch": (lambda rank: without_samples(rank, Ddp(model()), micro_batch(3 - 3 * rank, rank)), TOLD, EMPTY),
    "attacked": (lambda rank: attacked(rank, 2), "LossError|RankFailed", INSIDE),
    "attacked at once": (lambda rank: attacked(rank, 8), INSIDE, "LossError|"),
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


@on_ranks(2, limit=LIMIT)
def test_an_optimizer_that_fails_leaves_nobody_waiting_for_buffers(rank: int) -> None:
    """They were sent before; that the ranks have parted is said in the next window."""
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
    assert found[:2] == ["", "ValueError: mine" if rank else ""]
    assert "windows made: 2 on rank 0, 1 on rank 1" in found[2]


def behind_the_last(rank: int, fails: bool) -> Any:
    """Run out of memory once on one rank, in the last of a window's backwards."""
    network, calls = Ddp(model()), [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return raising(MEMORY) if rank and fails and calls[0] == 4 else gradient  # type: ignore[func-returns-value, return-value]

    optimizer, options = loops.OPTIMIZERS["sgd"](network.parameters()), Options(check=False)
    step = BigStep(network, optimizer, norms.CASES["spread"][1], micro_batch_size=4, options=options)
    next(network.parameters()).register_hook(hook)
    for number in range(3):
        step(micro_batch(8, 10 * number + rank))
    return weights(network), calls[0]


@on_ranks(2)
def test_out_of_memory_after_the_last_meeting(rank: int) -> None:
    """Others are at their statements, and begin the window anew with it: to the same weights."""
    (expected, calls), (found, more) = behind_the_last(rank, fails=False), behind_the_last(rank, fails=True)
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


@on_ranks(2)
def test_what_a_dropped_window_has_reached_is_not_compared_again(rank: int) -> None:
    """Each rank reaches other shards, drops that window, and the next one, of the same, is made."""
    network: Any = shards(two_heads())
    accumulator = made(network, steps=1)
    for head, error in ((rank, "WindowError"), (0, "")):
        x, y = micro_batch(4, rank)
        assert heard(accumulator.backward, F.cross_entropy(network(x, head), y)).partition(":")[0] == error
        accumulator.discard()


@pytest.mark.parametrize(("hook", "errors"), [(False, ["ConfigurationError"] * 2), (True, ["", "ValueError"])])
@on_ranks(2)
def test_an_update_without_samples_leaves_nothing_behind(rank: int, hook: bool, errors: list[str]) -> None:
    """Neither gradients nor a window, where it is refused, or a hook fails; a step by hand is none of ours."""
    network = model()
    optimizer = sgd(network, lr=0.1 if hook else 0.1 + rank)
    step = BigStep(network, optimizer, mean, micro_batch_size=2, options=Options(group=dist.group.WORLD))
    if rank and hook:
        step.before_step(partial(raising, ValueError("mine")))
    assert heard(step, None if rank else micro_batch(4, 0)).partition(":")[0] == errors[rank]
    assert all(p.grad is None for p in network.parameters())
    optimizer.step()


@on_ranks(2)
def test_ddp_is_as_it_was_after_the_last(rank: int) -> None:
    """And not before."""
    network = Ddp(model())
    both = [made(network), made(network)]
    for flag in (False, True):
        both.pop(0)
        gc.collect()
        assert network.require_backward_grad_sync == flag, rank


@pytest.mark.parametrize(("ranks", "shape"), [(2, None), (4, (2, 2))])
@on_ranks()
def test_shards_average_again(rank: int, ranks: int, shape: Any) -> None:
    """As they do by default, over all ranks, when nobody here needs them any more: two objects, and a refused one."""
    network, plain = shards(model(), shape=shape), model()
    assert "must be" in heard(lambda: BigStep(network, sgd(network), mean, micro_batch_size=0))
    accumulator = made(network, steps=1)
    accumulator = made(network, steps=1)
    gc.collect()
    accumulator.backward(mean(network, micro_batch(3, 0)))
    del accumulator
    gc.collect()
    mean(network, micro_batch(4, rank)).backward()
    for p, value in zip(plain.parameters(), weights(network), strict=True):
        p.data = value
    torch.stack([mean(plain, micro_batch(4, each)) for each in range(ranks)]).mean().backward()
    found, true = ([p.grad for p in each.parameters() if p.grad is not None] for each in (network, plain))
    assert distance([each.full_tensor() for each in cast("list[Any]", found)], true) <= 1e-12


@pytest.mark.parametrize(("wanted", "overlap"), [(True, True), (True, False), (False, True)])
@on_ranks(2)
def test_buffers_are_sent_once_per_update(rank: int, wanted: bool, overlap: bool) -> None:
    """Also where DDP reduces, whose forward would send them, too; and never where DDP would not."""
    network: Any = Ddp(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().eval())
    network.broadcast_buffers = wanted
    with patch.object(network, "_sync_buffers", wraps=network._sync_buffers) as sent:
        loops.train(rank, network, steps=1, overlap=overlap)
        if not overlap:  # ranks may have other numbers of micro-batches then
            step = BigStep(network, sgd(network), mean, micro_batch_size=2)
            for number in range(4):
                step(micro_batch(4 + 2 * rank, number))
    assert sent.call_count == (4 if overlap else 8) * wanted


@on_ranks(2)
def test_sums_of_low_precision_cross_the_wire_alike(rank: int) -> None:
    """Whatever number of micro-batches a rank has: here one, there three."""

    def loss(network: Any, batch: loops.Batch) -> Tensor:
        out = network(batch[0].bfloat16())
        return (out.float() - across.sum(out.sum(0)).float() / 100).pow(2).mean()

    network = Ddp(model().bfloat16())
    BigStep(network, sgd(network), loss, micro_batch_size=2)(micro_batch(2 + 4 * rank, rank))
    every: list[Any] = [None, None]
    dist.all_gather_object(every, weights(network))
    assert distance(*every) == 0


# A sample of the campaign.

FAULTS = [
    ("Accumulator", "ddp", "before a message", "user's own", 1002),
    ("Accumulator", "ddp", "optimizer before", "KeyboardInterrupt", 2),
    ("BigStep", "ddp", "forward", "OutOfMemoryError", 1003),
    ("BigStep", "across, again", "loss", "user's own", 5),
    ("BigStep", "batch norm", "forward", "OutOfMemoryError", 1004),
    ("BigStep", "batch norm", "after a message", "OutOfMemoryError", 4),
    ("BigStep", "batch norm", "backward", "SIGKILL", 3),
    ("BigStep", "batch norm", "in a collective", "SIGSTOP", 1005),
]


def test_a_fault_on_one_rank() -> None:
    """A sample of `make faults`, in every way in which ranks wait for each other."""
    cases = [Case("ranks", number, 0, *each) for number, each in enumerate(FAULTS)]
    found = dict(zip(FAULTS, map(rank_faults.Laboratory().try_out, cases), strict=True))
    assert found == dict.fromkeys(FAULTS, Outcome("fine"))

"""Sharded models in hard places: several models, nested loops, failures, other numbers of steps."""

import os
import signal
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep
from bigbatch.distributed import replicas
from bigbatch.distributed.fsdp_internals import groups_of
from bigbatch.distributed.replicas import Replicas
from bigbatch.errors import BatchError, ConfigurationError, OutOfMemory, SeveralCounts, StateError, WindowError
from bigbatch.window.gradients import Gradients
from tests.support.rank_loops import OPTIMIZERS, Batch, batches_of, mean, micro_batch, two_counts, windows_of
from tests.support.rank_shards import model, shards
from tests.support.ranks import RankFailed as Died
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

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


def with_other_steps(rank: int) -> Any:
    """Close a window on one rank where the other begins its next pass."""
    network = shards(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2 + rank)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))


def test_other_steps_on_every_rank_are_told_to_all() -> None:
    """A word about passes is not taken for one about a window."""
    refused(run_on_ranks(2, with_other_steps), WindowError, "the same steps=")


def without_a_batch(rank: int) -> Any:
    """Begin a loop on one rank alone."""
    network = shards(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2)
    for batch in accumulator.over(batches_of(rank, [[3, 5], []])):
        accumulator.backward(mean(network, batch))


def test_all_hear_of_a_rank_without_a_batch() -> None:
    """Nobody goes into the model to wait for it."""
    refused(run_on_ranks(2, without_a_batch), BatchError, "one batch at least")


def small() -> nn.Module:
    """Return another model, the same on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4)).double()


def nested(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train one model inside, and another outside, over the same batches."""
    found = []
    for wrapped in (shards, DistributedDataParallel):
        inner, outer = shards(small()), wrapped(small())
        inside = Accumulator(inner, OPTIMIZERS["sgd"](inner.parameters()), steps=2)
        outside = Accumulator(outer, OPTIMIZERS["sgd"](outer.parameters()), steps=2)
        for batch in outside.over(inside.over(batches_of(rank, sizes))):
            inside.backward(mean(inner, batch))
            outside.backward(mean(outer, batch))
        found += [weights(inner), weights(outer)]
    return found


@pytest.mark.parametrize("sizes", [SIZES, [[3, 5, 2, 4, 3], [6, 1, 1]]], ids=["even", "uneven"])
def test_nested_loops_have_the_inner_one_look_ahead(sizes: list[list[int]]) -> None:
    """And both know the last batch, and those that are given out again."""
    network = small()
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    for window in windows_of(sizes, 2):
        accumulator.backward(mean(network, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))))
    for each in run_on_ranks(2, nested, sizes):
        if isinstance(each, BaseException):
            raise each
        same(each, weights(network))


def inside_out(_: int) -> Any:
    """Put a loop that has nobody wait around one that does."""
    inner, outer = DistributedDataParallel(small()), shards(small())
    inside = Accumulator(inner, OPTIMIZERS["sgd"](inner.parameters()), steps=2)
    return Accumulator(outer, OPTIMIZERS["sgd"](outer.parameters()), steps=2).over(inside.over([]))


def test_the_loop_of_a_sharded_model_is_the_inner_one() -> None:
    """Only there it can have batches repeated for both."""
    refused(run_on_ranks(2, inside_out), ConfigurationError, "other.over(this.over(loader))")


def both(rank: int, sizes: Sequence[Sequence[int]], shape: tuple[int, ...]) -> Any:
    """Train two models at once, of which the first micro-batch of a window alone uses the second one."""
    found = []
    for overlap in (False, True):
        one, two = shards(model(), shape=shape), shards(small(), shape=shape)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.2)
        accumulator = Accumulator([one, two], optimizer, steps=2, clip_norm=1.0, overlap=overlap)
        for number, (x, y) in enumerate(accumulator.over(batches_of(rank, sizes))):
            accumulator.backward(F.cross_entropy(one(x) if number % 2 else one(x) + two(x), y))
        found.append([*weights(one), *weights(two)])
    return found


@pytest.mark.parametrize(("sizes", "shape"), [(SIZES, (2,)), ([[3, 5], [6, 1], [2, 2], [4, 3]], (2, 2))], ids=str)
def test_what_the_last_micro_batch_does_not_use_is_reduced(sizes: list[list[int]], shape: tuple[int, ...]) -> None:
    """Also where it is a model of its own, which no backward of FSDP finishes then."""
    one, two = model(), small()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.2)
    accumulator = Accumulator([one, two], optimizer, steps=99, clip_norm=1.0)
    for start in range(0, len(sizes[0]), 2):
        for own in (batches_of(rank, sizes) for rank in range(len(sizes))):
            for number, (x, y) in enumerate(own[start : start + 2]):
                accumulator.backward(F.cross_entropy(one(x) if number else one(x) + two(x), y))
        accumulator.flush()
    for each in run_on_ranks(len(sizes), both, sizes, shape):
        if isinstance(each, BaseException):
            raise each
        same(each, [*weights(one), *weights(two)])


def players() -> tuple[nn.Module, nn.Module]:
    """Return a model that makes samples, and one that judges them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5)).double(), nn.Sequential(nn.Linear(5, 4)).double()


def playing(rank: int, sizes: Sequence[Sequence[int]], given: bool, overlap: tuple[bool, bool]) -> Any:
    """Train both, each with an accumulator of its own; the first one may be given both."""
    one, two = map(shards, players())
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (one, two)]
    first = Accumulator([one, two] if given else one, optimizers[0], steps=2, overlap=overlap[0])
    second = Accumulator(two, optimizers[1], steps=2, overlap=overlap[1])
    for x, y in first.over(second.over(batches_of(rank, sizes))):
        made = one(x)
        before = [p.grad for p in two.parameters()]
        first.backward(F.cross_entropy(two(made), y))
        assert all(p.grad is gradient for p, gradient in zip(two.parameters(), before, strict=True))
        second.backward(F.cross_entropy(two(made.detach()), y))
    return [*weights(one), *weights(two)]


def played(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train them in every way."""
    each = list(product([False, True], [False, True]))
    ways = [(False, overlap) for overlap in each] + [(True, overlap) for overlap in each if not overlap[0]]
    return [playing(rank, sizes, *way) for way in ways]


def in_one_process(sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Train them on the micro-batches of all ranks, in the same order."""
    one, two = players()
    first = Accumulator(one, OPTIMIZERS["sgd"](one.parameters()), steps=99)
    second = Accumulator(two, OPTIMIZERS["sgd"](two.parameters()), steps=99)
    most = max(map(len, sizes))
    for number in range(most):
        every = [batches_of(rank, sizes)[number] for rank in range(len(sizes)) if number < len(sizes[rank])]
        made = [one(x) for x, _ in every]
        for each, (_, y) in zip(made, every, strict=True):
            first.backward(F.cross_entropy(two(each), y))
        if number % 2 or number == most - 1:
            first.flush()
        for each, (_, y) in zip(made, every, strict=True):
            second.backward(F.cross_entropy(two(each.detach()), y))
        if number % 2 or number == most - 1:
            second.flush()
    return [*weights(one), *weights(two)]


@pytest.mark.parametrize("sizes", [SIZES, [[3, 5, 2, 4, 3], [6, 1, 1]]], ids=["even", "uneven"])
def test_a_loss_leaves_shards_alone_that_another_trains(sizes: list[list[int]]) -> None:
    """Two players: the gradients of one run through the other, and add nothing there."""
    for each in run_on_ranks(2, played, sizes):
        if isinstance(each, BaseException):
            raise each
        same(each, in_one_process(sizes))


def failing(rank: int, how: str) -> Any:
    """Fail on one rank, in its second micro-batch of the second update."""
    network = shards(model())
    calls = 0

    def loss_fn(network: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if rank and calls == 5:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how != "several":
                raise ValueError("mine") if how == "raises" else torch.OutOfMemoryError("CUDA out of memory")
            batch[1][0] = -100
        return two_counts(network, batch)

    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), loss_fn, micro_batch_size=2)
    for number in range(2):
        x, y = micro_batch(6, rank + number)
        step((x, y.clamp(min=0)))


FAILURES: dict[str, tuple[type[BaseException], str]] = {
    "raises": (ValueError, "mine"),
    "memory": (OutOfMemory, "Take a smaller micro_batch_size, or activation checkpointing"),
    "several": (SeveralCounts, "averaged over different things"),
    "killed": (Died, "the process died"),
}
BEFORE_GLOO = 18.0  # seconds: it gives up after 20, and a rank that fails should not wait for that


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_inside_a_sharded_model_says_nothing_there(how: str) -> None:
    """It raises its own error at once; the others, who wait inside the model, end when its process does."""
    waiting, failed = run_on_ranks(2, failing, how, limit=BEFORE_GLOO)
    refused([failed], *FAILURES[how])
    assert isinstance(waiting, RuntimeError), waiting


def short_of_memory(rank: int, when: str) -> Any:
    """Run out of memory on one rank: in a micro-batch, or when gradients are added up; or be killed there."""
    replicas._BUCKET = 64  # one gradient is larger, and is sent from where it is
    network = DistributedDataParallel(model())
    plain, calls = Replicas.reduce, 0

    def reduce(self: Replicas, *given: Any) -> Any:
        if when == "adding up" and rank and self.windows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")
        return plain(self, *given)

    def loss_fn(network: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if when == "killed" and rank and calls > 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "micro-batch" and rank and calls > 9 and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mean(network, batch)

    Replicas.reduce = reduce  # type: ignore[method-assign, assignment]  # in a process that ends
    step = BigStep(network, OPTIMIZERS["adamw"](network.parameters()), loss_fn, micro_batch_size=4, clip_norm=1.0)
    for number in range(4):
        step(micro_batch(8 + rank, 100 * rank + number))
    assert not rank or calls > 9
    return weights(network)


def test_a_rank_that_runs_out_of_memory_tries_again_alone() -> None:
    """With smaller micro-batches, and all come to the weights of one process."""
    network = model()
    accumulator = Accumulator(network, OPTIMIZERS["adamw"](network.parameters()), steps=2, clip_norm=1.0)
    for number in range(4):
        for rank in range(2):
            accumulator.backward(mean(network, micro_batch(8 + rank, 100 * rank + number)))
    same(run_on_ranks(2, short_of_memory, "micro-batch"), weights(network))


@pytest.mark.parametrize(
    ("when", "kind", "says"),
    [("adding up", OutOfMemory, "cannot try again alone"), ("killed", Died, "the process died")],
)
def test_a_rank_that_others_have_heard_of_ends(when: str, kind: type[BaseException], says: str) -> None:
    """Others wait for its gradients, or for its statement, until it has ended."""
    waiting, failed = run_on_ranks(2, short_of_memory, when, limit=BEFORE_GLOO)
    refused([failed], kind, says)
    assert isinstance(waiting, RuntimeError), waiting


class DeepSpeedEngine(nn.Module):
    """What a model is in after deepspeed.initialize(), by its name."""

    def __init__(self, module: nn.Module) -> None:
        """Wrap a model."""
        super().__init__()
        self.module = module


def other_wrappers(_: int) -> list[Any]:
    """Give models in wrappers that reduce in ways of their own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    inner = nn.Sequential(FullyShardedDataParallel(model(), device_id=cpu))
    found = [
        FullyShardedDataParallel(model(), device_id=cpu),
        inner,
        DeepSpeedEngine(model()),
        nn.DataParallel(model()),
    ]

    def big_step(network: nn.Module) -> Any:
        return BigStep(network, OPTIMIZERS["sgd"](network.parameters()), mean)

    def accumulator(network: nn.Module) -> Any:
        return Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)

    return [tried(make, network) for network in found for make in (accumulator, big_step)]


def test_wrappers_that_reduce_in_their_own_way_are_refused() -> None:
    """Each with what to use instead."""
    for found in run_on_ranks(2, other_wrappers):
        says = [
            "fully_shard(model)",
            "(0) is wrapped in FullyShardedDataParallel",
            "accumulates, clips and",
            "torchrun",
        ]
        for place, each in enumerate(says):
            refused(found[2 * place : 2 * place + 2], ConfigurationError, each)


class Sent(Exception):
    """Where something was to be sent from."""


def offloaded(_: int) -> Any:
    """Have shards compute on a device where they do not wait; nothing can really be sent from that."""
    network: Any = shards(model())
    for group in groups_of(network):
        group.device = torch.device("meta")
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), mean, micro_batch_size=2)
    found = step._stepper.ranks
    host = torch.device("cpu")

    def send(tensor: Tensor, **_: Any) -> None:
        raise Sent(tensor.device.type)

    def gather(_: object, tensor: Tensor, **__: Any) -> None:
        send(tensor)

    torch.distributed.all_reduce, torch.distributed.all_gather = send, gather  # type: ignore[assignment]
    said = [
        tried(found.most, 1, host),
        tried(found.fail, host),
        tried(found.rows, "statement", [1.0], host),
        tried(found.norm, Gradients([OPTIMIZERS["sgd"](network.parameters())], None)),
        tried(found.share_flags, [torch.zeros(1)]),
        tried(found.anywhere, [True], host),
    ]
    return step._mover.device.type, [str(each) for each in said if isinstance(each, Sent)]


def test_shards_in_host_memory_send_from_where_they_compute() -> None:
    """Micro-batches go there, too: a group of NCCL alone serves no other device."""
    for each in run_on_ranks(2, offloaded, limit=BEFORE_GLOO):
        if isinstance(each, BaseException) and not isinstance(each, Died):
            raise each
        assert each == ("meta", ["meta"] * 6), each


def breaking(rank: int, kind: str, on: tuple[int, ...]) -> Any:
    """Leave the loop early on some ranks, and make an update of what there is."""
    network = WRAPPED[kind](model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2)
    for number, batch in enumerate(accumulator.over(batches_of(rank, SIZES))):
        accumulator.backward(mean(network, batch))
        if rank in on and number == 0:
            break
    accumulator.flush()
    return weights(network)


def test_a_break_on_one_rank_is_told_to_it() -> None:
    """When it makes its last update; others end when its process does. With shards, all are told."""
    going_on, broken = run_on_ranks(2, breaking, "ddp", (1,), limit=BEFORE_GLOO)
    refused([broken], WindowError, "Break on all ranks in the same window")
    assert isinstance(going_on, RuntimeError), going_on
    refused(run_on_ranks(2, breaking, "shards", (1,), limit=BEFORE_GLOO), WindowError, "at different places")
    one, other = run_on_ranks(2, breaking, "ddp", (0, 1))
    same([other], one)

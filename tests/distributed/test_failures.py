"""What one rank cannot go on with: the others hear of it, in time and in words, or all begin the window anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, Options
from bigbatch.distributed.discovery import team_of
from bigbatch.errors import OutOfMemory, RankFailed, SeveralCounts, WindowBroken
from tests.support.rank_loops import OPTIMIZERS, batches_of, mean, micro_batch, model, truth, two_counts
from tests.support.rank_norms import CASES, made
from tests.support.rank_shards import shards
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

Named = tuple[str, str]
NONE = ("", "")


def heard(work: Callable[[], object]) -> Named:
    """Return the kind of the error that something raises, and its text."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whichever it is
        return type(error).__name__, str(error)
    return NONE


def in_group(**named: Any) -> tuple[nn.Module, torch.optim.Optimizer, Accumulator]:
    """Return a model that all ranks train without a wrapper."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return network, optimizer, Accumulator(network, optimizer, **{"steps": 1, "group": dist.group.WORLD, **named})


def stepped_by_hand(optimizer: torch.optim.Optimizer) -> Named:
    """Make a step without any window."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = heard(optimizer.step)
    return ("left", f"{len(grads)} gradients") if grads else found


def without_batches(rank: int) -> Any:
    """Have another learning rate on the rank that still has batches."""
    network, optimizer, accumulator = in_group()

    def train() -> None:
        for number, batch in enumerate(accumulator.over(batches_of(rank, [[2, 2, 2], [2]]))):
            optimizer.param_groups[0]["lr"] = 0.1 + number
            accumulator.backward(mean(network, batch))

    refused = heard(train)
    accumulator.discard()
    return refused[0], stepped_by_hand(optimizer)


def test_an_empty_window_that_is_refused_is_not_left_open() -> None:
    """A rank whose loader has ended takes part with none of its own: there is nothing to drop afterwards."""
    assert run_on_ranks(2, without_batches) == [("ConfigurationError", NONE)] * 2


def without_samples(rank: int, failing: str) -> Any:
    """Have an update without samples be refused, or fail in a hook."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1 + (rank if failing == "settings" else 0))
    step = BigStep(network, optimizer, mean, micro_batch_size=2, options=Options(group=dist.group.WORLD))
    if rank and failing == "hook":

        def hook() -> None:
            raise ValueError("mine")

        step.before_step(hook)
    return heard(lambda: step(None if rank else micro_batch(4, 0)))[0], stepped_by_hand(optimizer)


@pytest.mark.parametrize(
    ("failing", "errors"), [("settings", ("ConfigurationError",) * 2), ("hook", ("", "ValueError"))]
)
def test_an_update_without_samples_leaves_nothing_behind(failing: str, errors: tuple[str, str]) -> None:
    """Neither gradients nor a window."""
    assert run_on_ranks(2, without_samples, failing) == [(error, NONE) for error in errors]


def other_totals(rank: int) -> Any:
    """Count something else in advance than the loss does, on one rank."""
    wrong = 1 if rank else 0
    network, _, accumulator = in_group(counts=lambda batch: ((batch[1] != -100).sum() + wrong, 4 * len(batch[1])))

    def train() -> None:
        for batch in accumulator.over(batches_of(rank, [[3], [3]])):
            accumulator.backward(two_counts(network, batch))

    return heard(train)


def broken(rank: int) -> Any:
    """Close a window whose backward has failed, on one rank."""
    network, _, accumulator = in_group(steps=2)

    def fail(_: Tensor) -> None:
        raise ValueError("mine")

    batch = micro_batch(3, rank)
    accumulator.backward(mean(network, batch))
    if rank:
        loss = mean(network, batch)
        loss.register_hook(fail)
        assert heard(lambda: accumulator.backward(loss))[0] == "ValueError"
    return heard(accumulator.flush)


@pytest.mark.parametrize(("work", "error"), [(other_totals, SeveralCounts), (broken, WindowBroken)])
def test_who_refuses_to_close_says_so(work: Callable[[int], Any], error: type[Exception]) -> None:
    """Others, who have come to the same window, do not wait for it; the error is told where it is."""
    (waiting, said), (refusing, _) = run_on_ranks(2, work, limit=10)
    assert (waiting, refusing) == ("RankFailed", error.__name__), said
    assert "rank 1 failed in this window" in said


def out_of_memory_in_a_norm(rank: int) -> Any:
    """Run out of memory on one rank, in the model between two norms."""
    kind, loss_of = CASES["batch norm"]
    network = DistributedDataParallel(made(kind), find_unused_parameters=True)

    def fail(*_: object) -> None:
        if rank:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")

    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), loss_of, micro_batch_size=2)
    step(micro_batch(4, rank))
    network.module.norm.register_forward_hook(fail)
    step(micro_batch(4, 10 + rank))


def test_out_of_memory_where_ranks_meet_in_norms() -> None:
    """It cannot try again alone: it says so, and the others say that it is gone."""
    one, other = run_on_ranks(2, out_of_memory_in_a_norm)
    assert isinstance(other, OutOfMemory), other
    assert "cannot try again alone" in str(other)
    assert isinstance(one, RankFailed), one
    assert "in that rank's own output" in str(one)


def out_of_memory_behind(rank: int, name: str, failing: bool) -> Any:
    """Run out of memory once on one rank, in the last of a window's backwards, or in joining what it returns."""
    network = DistributedDataParallel(model())
    calls = [0]

    def fail(gradient: Tensor) -> Tensor:
        calls[0] += 1
        if rank and failing and calls[0] == 4:  # of the second window's two, the last
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")
        return gradient

    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), CASES[name][1], micro_batch_size=4)
    next(network.parameters()).register_hook(fail)
    for number in range(3):
        step(micro_batch(8, 10 * number + rank))
    return [p.detach() for p in network.parameters()], calls[0]


@pytest.mark.parametrize("name", ["root", "spread"])
def test_out_of_memory_after_the_last_meeting(name: str) -> None:
    """Others are at their statements, and begin the window anew with it: to the same weights."""
    true = run_on_ranks(2, out_of_memory_behind, name, False)
    for each, (expected, calls) in zip(run_on_ranks(2, out_of_memory_behind, name, True), true, strict=True):
        if isinstance(each, BaseException):
            raise each
        assert each[1] > calls
        assert distance(each[0], expected) <= 1e-12


def inside_no_sync(rank: int, by_hand: bool) -> Any:
    """Make an accumulator inside of no_sync(), or have DDP reduce again later."""
    network = DistributedDataParallel(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    if not by_hand:
        with network.no_sync():
            return heard(lambda: Accumulator(network, optimizer, steps=2))
    accumulator = Accumulator(network, optimizer, steps=2, clip_norm=1.0)
    network.require_backward_grad_sync = True
    batches = batches_of(rank, [[3, 2], [1, 4]])
    said = heard(lambda: accumulator.backward(mean(network, batches[0])))
    for batch in batches:
        accumulator.backward(mean(network, batch))
    return said, [p.detach() for p in network.parameters()]


def test_an_accumulator_inside_of_no_sync_is_refused() -> None:
    """When no_sync() ends, DDP would reduce behind its back."""
    for kind, said in run_on_ranks(2, inside_no_sync, False):
        assert kind == "ConfigurationError"
        assert "outside of no_sync()" in said


def test_a_wrapper_that_is_about_to_reduce_is_seen() -> None:
    """Before the backward in which it would; the same forward once more is then the big batch's."""
    for found in run_on_ranks(2, inside_no_sync, True):
        if isinstance(found, BaseException):
            raise found
        (kind, said), weights = found
        assert kind == "WindowDisturbed", said
        assert "no_sync()" in said
        assert distance(weights, truth([[3, 2], [1, 4]], 2, "mean", "sgd")[0]) <= 1e-12


class Walked(nn.Sequential):
    """Counts how often its modules are walked."""

    walks = 0

    def named_modules(self, *arguments: Any, **named: Any) -> Any:
        """Walk them."""
        Walked.walks += 1
        return super().named_modules(*arguments, **named)


def walked(rank: int) -> list[int]:
    """Return the walks of each backward of a window through shards, but for the last, which closes it."""
    torch.manual_seed(0)
    network = shards(Walked(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=6)
    found = []
    for batch in batches_of(rank, [[2] * 5] * 2):
        loss = F.cross_entropy(network(batch[0]), batch[1])
        before = Walked.walks
        accumulator.backward(loss)
        found.append(Walked.walks - before)
    accumulator.discard()
    return found


def test_modules_are_walked_once_a_window() -> None:
    """Not in every backward of a sharded model."""
    for found in run_on_ranks(2, walked):
        assert found[0] > 0
        assert found[1:] == [0] * 4


def too_much(_: int) -> Named:
    """Say more numbers than a message has."""
    network = model()
    team: Any = team_of([network], dist.group.WORLD)
    return heard(lambda: team.rows("statement", [0.0] * 50, torch.device("cpu")))


def test_a_message_that_is_too_long_is_not_sent() -> None:
    """Others send one of the agreed length, and all would wait."""
    assert [kind for kind, _ in run_on_ranks(2, too_much)] == ["AssertionError"] * 2

"""Several ranks that would part, die or wait without a word: each is right to 1e-12, or all of them say what it is."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from bigbatch import Accumulator, BigStep, Options, counted, verify
from bigbatch.errors import BatchError, ConfigurationError, LossError, WindowError
from bigbatch.window.tally import Ledger
from tests.support.rank_checks import SIZES, one_process, refused, right
from tests.support.rank_errors import heard
from tests.support.rank_loops import (
    CLASSES,
    OPTIMIZERS,
    Batch,
    batches_of,
    mean,
    micro_batch,
    model,
    summed,
    two_counts,
    two_heads,
)
from tests.support.rank_shards import shards
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks


# DDP's own reduction, window after window.


def past_the_wrapper_later(rank: int) -> Any:
    """Call DDP in the first window, and the module inside it in those after."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, overlap=True)
    for number, batch in enumerate(accumulator.over(batches_of(rank, SIZES))):
        accumulator.backward(mean(network.module if number else network, batch))


def test_what_ddp_has_reduced_before_says_nothing_of_now() -> None:
    """Each window is asked anew."""
    refused(run_on_ranks(2, past_the_wrapper_later), LossError, "DDP has not reduced all")


def counting_broadcasts(rank: int) -> Any:
    """Count how often buffers are sent."""
    network = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().eval())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    accumulator = Accumulator(network, optimizer, steps=1, overlap=True)
    sent = []
    plain: Any = network._sync_buffers

    def counting() -> None:
        sent.append(1)
        plain()

    vars(network)["_sync_buffers"] = counting
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))
    return len(sent)


def test_buffers_are_sent_once_per_update() -> None:
    """Also where DDP reduces, whose forward would send them, too."""
    assert run_on_ranks(2, counting_broadcasts) == [4, 4]


def with_other_batches(rank: int, left_out: str) -> Any:
    """Have a rank without batches, or one that passes over its last."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    sizes = [SIZES[0], [] if left_out == "all" else SIZES[1]]
    for number, batch in enumerate(accumulator.over(batches_of(rank, sizes))):
        if number < 3 or (left_out == "the last of one" and rank == 0):
            accumulator.backward(mean(network, batch))


def test_a_rank_without_batches_is_heard_of_before_ddp_reduces() -> None:
    """By all, once in every `over`."""
    refused(run_on_ranks(2, with_other_batches, "all"), BatchError, "rank 1 has no batch in this `over`")


def test_a_last_batch_without_a_backward_is_an_error_where_it_is_left_out() -> None:
    """Others are in the midst of DDP's reduction, and hear from torch when this process ends."""
    found = run_on_ranks(2, with_other_batches, "the last of both")
    refused(found, WindowError, "the last batch of `over` had no accumulator.backward(loss)")
    one, other = run_on_ranks(2, with_other_batches, "the last of one")
    refused([other], WindowError, "leave batches out before accumulator.over(loader)")
    assert isinstance(one, RuntimeError)


# What DDP does not reduce.


def beside_ddp(name: str) -> tuple[Any, list[nn.Module], list[nn.Parameter]]:
    """Return how to compute a loss, the models, and what is trained, where DDP reduces a part of it."""
    whole: Any = model()
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    if name == "a module":
        wrapped = DistributedDataParallel(whole[0])
        return (lambda x: whole[2](torch.tanh(wrapped(x)))), [wrapped, whole[2]], list(whole.parameters())
    if name == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, ["2.weight"])
    if name == "frozen at first":
        whole[2].requires_grad_(False)
    wrapped = DistributedDataParallel(whole)
    whole.requires_grad_(True)
    bare = name == "a parameter"
    return (lambda x: wrapped(x) * scale if bare else wrapped(x)), [wrapped], [*whole.parameters()] + [scale] * bare


BESIDE = ("a module", "a parameter", "ignored", "frozen at first")


def trained_beside_ddp(rank: int, overlap: bool) -> Any:
    """Train each of them, or hear why not."""
    found: list[Any] = []
    for name in BESIDE:
        forward, models, trained = beside_ddp(name)
        try:
            accumulator = Accumulator(models, OPTIMIZERS["sgd"](trained), steps=2, overlap=overlap)
        except ConfigurationError as error:
            found.append(str(error))
            continue
        for x, y in accumulator.over(batches_of(rank, SIZES)):
            accumulator.backward(F.cross_entropy(forward(x), y))
        found.append([p.detach() for p in trained])
    return found


def test_overlap_is_for_what_ddp_reduces() -> None:
    """All else would go apart."""
    for found in run_on_ranks(2, trained_beside_ddp, True):
        for words in found:
            assert "parameters of the optimizer are none that it reduces" in words
            assert "no overlap=True" in words


def test_without_overlap_all_that_is_trained_is_added_up() -> None:
    """Whatever DDP wraps of it."""
    one, other = run_on_ranks(2, trained_beside_ddp, False)
    for name, *each in zip(BESIDE, one, other, strict=True):
        right(each, each[0])
        if name != "a parameter":
            right(each, one_process(2))


def unfrozen_between_windows(rank: int) -> Any:
    """Train later what DDP has not known from the beginning."""
    network: Any = model()
    network[0].requires_grad_(False)
    wrapped = DistributedDataParallel(network)
    accumulator = Accumulator(wrapped, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    for number, batch in enumerate(batches_of(rank, SIZES)):
        network[0].requires_grad_(number > 1)
        accumulator.backward(mean(wrapped, batch))


def test_what_ddp_has_never_known_is_not_stepped_with() -> None:
    """It was frozen when DDP was made, and is not now."""
    refused(run_on_ranks(2, unfrozen_between_windows), LossError, "DDP has not reduced all")


# Who trains together.


def in_pairs(rank: int) -> Any:
    """Wrap the model for all ranks, and have two of them train together."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    network = DistributedDataParallel(model())
    return Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, group=pairs[rank // 2])


def test_a_group_is_that_of_the_wrapper() -> None:
    """Pairs would part, each with weights of its own."""
    for rank, error in enumerate(run_on_ranks(4, in_pairs)):
        refused(
            [error],
            ConfigurationError,
            f"Got group= of ranks {[[0, 1], [2, 3]][rank // 2]}",
        )


def refused_on_one(rank: int) -> Any:
    """Have objects refused on one rank alone, then make the same on all; and one more on one rank, in the end."""
    network = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    found = []
    if rank == 0:
        found = [
            heard(lambda: BigStep(network, optimizer, mean, micro_batch_size=0)),
            heard(lambda: Accumulator(network, optimizer, steps=1, batch_norm="other")),  # type: ignore[arg-type]
        ]
    assert all("must be" in words for words in found)
    step = BigStep(network, optimizer, mean, micro_batch_size=2)
    step(micro_batch(3, rank))
    more = [Accumulator(network, optimizer, steps=7)] if rank == 0 else []
    last = Accumulator(network, optimizer, steps=1)
    return [heard(last.backward, mean(network, micro_batch(3, rank))), len(more)]


def test_what_was_refused_on_one_rank_does_not_count() -> None:
    """The others go on with it; one that was made there alone does, and all are told."""
    for words, _ in run_on_ranks(2, refused_on_one):
        assert "as many accumulators and BigSteps" in words


def refused_shards(rank: int) -> Any:
    """Have an object refused, then take a gradient by hand."""
    network = shards(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    words = heard(lambda: BigStep(network, optimizer, mean, micro_batch_size=0))
    mean(network, micro_batch(4, rank)).backward()
    every: list[Any] = list(network.parameters())
    return words, [p.grad.full_tensor() for p in every]


def test_what_was_refused_leaves_shards_as_they_were() -> None:
    """They average, as fully_shard does by default."""
    network = model()
    parts = [torch.autograd.grad(mean(network, micro_batch(4, rank)), list(network.parameters())) for rank in (0, 1)]
    true = [(one + other) / 2 for one, other in zip(*parts, strict=True)]
    for words, gradients in run_on_ranks(2, refused_shards):
        assert "micro_batch_size must be" in words
        assert distance(gradients, true) <= 1e-12


# What only some ranks know when a window closes.


def sparse_on_one(rank: int) -> Any:
    """Have sparse gradients on one rank, and no samples on the other, twice."""
    torch.manual_seed(0)
    network = nn.EmbeddingBag(5, 4, sparse=True)
    step = BigStep(network, torch.optim.SGD(network.parameters(), lr=0.1), mean, micro_batch_size=2, options=of_all())
    return [heard(lambda: step(None if rank else (torch.randint(5, (4, 2)), torch.randint(4, (4,))))) for _ in range(2)]


def of_all() -> Options:
    """Have all ranks make a big batch together, without a wrapper."""
    return Options(group=dist.group.WORLD)


def test_sparse_gradients_of_one_rank_are_refused_by_all() -> None:
    """The others would send what it does not."""
    for found in run_on_ranks(2, sparse_on_one):
        assert ["sparse=False" in words for words in found] == [True, True]


def with_hooks(rank: int) -> Any:
    """Give DDP a way to reduce: one of torch's own, one that comes later, and one that casts."""
    network = DistributedDataParallel(model())
    network._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    found = [heard(lambda: Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2))]
    other = DistributedDataParallel(model())
    accumulator = Accumulator(other, OPTIMIZERS["sgd"](other.parameters()), steps=1)
    other.register_comm_hook(None, allreduce_hook)
    found += [heard(accumulator.backward, mean(other, micro_batch(3, rank)))]
    casting = DistributedDataParallel(model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    return [*found, heard(lambda: Accumulator(casting, OPTIMIZERS["sgd"](casting.parameters()), steps=2))]


def test_communication_hooks_that_would_not_be_called() -> None:
    """Also torch's own, and those that come after the accumulator; a cast is not one that anybody has registered."""
    for builtin, later, casting in run_on_ranks(2, with_hooks):
        assert "has a communication hook" in builtin
        assert (
            "has a communication hook, and gradients are reduced without DDP, so it would not be called, on rank"
            in later
        )
        assert "instead of mixed_precision=" in casting


# A step that fails on one rank alone: nobody waits for it.


def failing_once(rank: int, kind: str) -> Any:
    """Have a hook, or the optimizer, fail on one rank in the second of three windows; all go on."""
    wrapped: nn.Module = (
        DistributedDataParallel(two_heads(), find_unused_parameters=True) if kind == "buffers" else shards(model())
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    accumulator = Accumulator(wrapped, optimizer, steps=1, clip_norm=1.0)
    bad = [False]

    def hook(*_: object) -> None:
        if bad[0]:
            raise ValueError("mine")

    if rank == 1:
        (optimizer.register_step_pre_hook if kind == "buffers" else accumulator.before_step)(hook)
    found = []
    for number in range(3):
        bad[0] = number == 1
        x, y = micro_batch(4, number + rank)
        out = wrapped(x, 0) if kind == "buffers" else wrapped(x)
        found.append(heard(accumulator.backward, F.cross_entropy(out, y)))
        accumulator.discard()
    return found


def test_an_optimizer_that_fails_leaves_nobody_waiting_for_buffers() -> None:
    """They were sent before; that the ranks have parted is said in the next window."""
    one, other = run_on_ranks(2, failing_once, "buffers", limit=15)
    assert one[:2] == ["", ""]
    assert other[:2] == ["", "ValueError: mine"]
    assert all("different numbers of windows" in words for words in (one[2], other[2]))


def test_a_hook_that_fails_leaves_nobody_waiting_for_a_norm() -> None:
    """Nobody has stepped, so all go on; also where only one rank has a hook."""
    one, other = run_on_ranks(2, failing_once, "shards", limit=15)
    assert other == ["", "ValueError: mine", ""]
    assert one[::2] == ["", ""]
    assert "RankFailed: a before_step hook failed on another rank" in one[1]


# Micro-batches that count nothing, where every backward reduces.

NOTHING = [(0, 1), (1, 2)]  # rank and number of those


def of_some_values(network: nn.Module, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Return a mean that divides by its count by hand, 0 / 0 in some micro-batches, and the count."""
    values = network(micro_batch(3, 10 * rank + number)[0]).pow(2).mean(1)
    mask = torch.full_like(values.detach(), float((rank, number) not in NOTHING))
    return (values * mask).sum() / mask.sum(), mask.sum()


def dividing_by_nothing(rank: int, numbers: Sequence[int], overlap: bool) -> Any:
    """Train by such means, with another number of micro-batches on each rank."""
    network = DistributedDataParallel(model()) if overlap else shards(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=2, overlap=overlap)
    for number in accumulator.over(range(numbers[rank])):
        accumulator.backward(*of_some_values(network, rank, number))
    every: list[Any] = list(network.parameters())
    return [p.detach() if overlap else p.full_tensor().detach() for p in every]


@pytest.mark.parametrize(("numbers", "overlap"), [([4, 4], True), ([4, 3], False)], ids=["overlap", "shards"])
def test_what_counts_nothing_adds_nothing(numbers: list[int], overlap: bool) -> None:
    """Though its gradient is NaN, also where it is passed by with once more, for company."""
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    for window in ((0, 1), (2, 3)):
        every = [(rank, number) for rank in (0, 1) for number in window if number < numbers[rank]]
        means = [of_some_values(network, *each) for each in every if each not in NOTHING]
        optimizer.zero_grad()
        (torch.stack([value * count for value, count in means]).sum() / sum(count for _, count in means)).backward()
        optimizer.step()
    true = [p.detach() for p in network.parameters()]
    right(run_on_ranks(2, dividing_by_nothing, numbers, overlap), true)


def found_late(rank: int) -> Any:
    """Have a count that only a device knows, which is 0 on one rank, and a gradient of 0 / 0."""
    network = shards(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2)
    values = network(micro_batch(3, rank)[0]).pow(2).mean(1)
    accumulator.backward(values.mean() * (math.nan if rank else 1.0), count=torch.tensor(3.0))
    window: Any = accumulator._window
    window.ledger.nothings = torch.tensor(float(rank))  # as it would be there
    accumulator.backward(network(micro_batch(3, rank)[0]).pow(2).mean(1).mean(), count=torch.tensor(3.0))


def test_a_count_that_a_device_finds_to_be_nothing() -> None:
    """Where its gradient is not finite, nobody steps with that."""
    refused(run_on_ranks(2, found_late), LossError, "mask.sum().clamp(min=1)")
    ledger = Ledger(steps=2, in_common=True)
    ledger.pending = [(torch.tensor(math.nan), torch.tensor(0.0)), (torch.tensor(2.0), torch.tensor(3.0))]
    ledger.fold()
    assert (float(ledger.nothings), float(ledger.loss)) == (1.0, 6.0)


# What is said.


def misusing(rank: int) -> Any:
    """Return what is said of some mistakes."""
    network, other = shards(model()), shards(model())
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*network.parameters(), scale], lr=0.1, foreach=False)
    accumulator = Accumulator(network, optimizer, steps=2)
    x, y = micro_batch(3, rank)
    found = {"bare": heard(accumulator.backward, F.cross_entropy(network(x) * scale, y))}
    accumulator = Accumulator(other, OPTIMIZERS["sgd"](other.parameters()), steps=2)
    every: list[Any] = list(other.parameters())
    penalty = torch.stack([p.full_tensor().pow(2).sum() for p in every]).sum()
    found["sharded"] = heard(accumulator.backward, F.cross_entropy(other(x), y) + 0.1 * counted(penalty, "once"))
    found["no optimizer"] = heard(lambda: Accumulator(network, only_one(network), steps=2, overlap=True))
    found["verified shards"] = heard(verify, network, mean, (x, y), 2)
    wrapped = DistributedDataParallel(model())
    found["verified"] = heard(verify, wrapped, mean, (x, y), 2)
    step = BigStep(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), mean, micro_batch_size=2)
    found["empty"] = heard(step, micro_batch(3 * rank, rank))
    return found


def only_one(network: nn.Module) -> torch.optim.Optimizer:
    """Train one parameter alone."""
    return torch.optim.SGD([next(network.parameters())], lr=0.1)


def test_what_is_said_is_of_what_there_is() -> None:
    """A parameter that nobody has sharded is not called so, a sharded model is not called DDP, and None has a name."""
    for rank, found in enumerate(run_on_ranks(2, misusing)):
        assert "fully_shard has not sharded" in found["bare"]
        assert "parameters that fully_shard has sharded" in found["sharded"]
        assert "in no optimizer here" in found["no optimizer"]
        assert "before fully_shard is called" in found["verified shards"]
        assert "before it is wrapped" in found["verified"]
        assert ("rank 0 failed" if rank else "calls  step(None)") in found["empty"]


def once_beside(rank: int) -> Any:
    """Have a term of parameters alone beside two counts that are known, or a sum, and a rank without batches."""
    network = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def counts(batch: Batch) -> tuple[Tensor, int]:
        return (batch[1] != -100).sum(), len(batch[1]) * CLASSES

    def train(accumulator: Accumulator, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        for batch in accumulator.over(batches_of(rank, [[3, 5], []])):
            penalty = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
            accumulator.backward(loss(network, batch) + 0.01 * counted(penalty, "once"))

    known = Accumulator(network, optimizer, steps=2, counts=counts)
    found = [heard(train, known, two_counts)]
    known.discard()
    return [*found, heard(train, Accumulator(network, optimizer, steps=2), of_a_sum)]


def of_a_sum(network: nn.Module, batch: Batch) -> Tensor:
    """Count a loss as a sum."""
    return counted(summed(network, batch), "sum")


def test_a_share_of_a_term_is_spoken_of_as_what_it_stands_beside() -> None:
    """Counts that are known are no sum."""
    for known, of_sum in run_on_ranks(2, once_beside):
        assert "beside terms whose counts are known in advance" in known
        assert "beside a sum: every rank adds its share" in of_sum

"""Several ranks, real process groups: the same final weights as one process on the union of the batches."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, Options, counted
from bigbatch.errors import ConfigurationError, LossError, RankFailed, SeveralCounts, WindowError
from tests.support.rank_loops import (
    CLASSES,
    LOSSES,
    OPTIMIZERS,
    Batch,
    assert_same,
    batches_of,
    mean,
    micro_batch,
    model,
    summed,
    truth,
    two_counts,
    two_heads,
    windows_of,
)
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks


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


@pytest.mark.parametrize("loss", list(LOSSES))
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


# A big batch of all ranks' parts.


def big_steps(rank: int, sizes: Sequence[Sequence[int]], loss: str, optimizer: str) -> Any:
    """Give each batch of this rank as its part of a big batch; 0 stands for none."""
    network = DistributedDataParallel(model())
    chosen = OPTIMIZERS[optimizer](network.parameters())
    step = BigStep(network, chosen, LOSSES[loss], micro_batch_size=2, clip_norm=1.0)
    updates = []
    for number, size in enumerate(sizes[rank]):
        update = step(micro_batch(size, 100 * rank + number) if size else None)
        updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return [p.detach() for p in network.parameters()], updates


@pytest.mark.parametrize("loss", ["mean", "mean_and_weights", "summed", "sum_and_weights"])
def test_big_steps_of_two_ranks_are_one_process(loss: str) -> None:
    """Parts of other sizes, cut into micro-batches in each rank's own way."""
    sizes = [[3, 5, 4], [7, 1, 6]]
    assert_same(run_on_ranks(2, big_steps, sizes, loss, "adamw"), truth(sizes, 1, loss, "adamw"))


def test_big_steps_with_a_part_that_is_empty() -> None:
    """None stands for no samples."""
    sizes = [[3, 0, 4, 5], [7, 5, 0, 2], [0, 1, 1, 2], [2, 2, 2, 0]]
    found = run_on_ranks(4, big_steps, sizes, "mean", "sgd")
    network = model()
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, clip_norm=1.0)
    updates = []
    for number in range(4):
        parts = [micro_batch(own[number], 100 * rank + number) for rank, own in enumerate(sizes) if own[number]]
        update = accumulator.backward(
            mean(network, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        )
        assert update is not None
        updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    assert_same(found, ([p.detach() for p in network.parameters()], updates))


def test_several_counts_are_learned_over_all_ranks() -> None:
    """One rank finds out by itself, the other hears of it; also a rank that has no samples."""
    sizes = [[4, 4, 0], [7, 3, 5]]
    found = run_on_ranks(2, two_counts_big_steps, sizes)
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    for number in range(3):
        parts = [micro_batch(own[number], 100 * rank + number) for rank, own in enumerate(sizes) if own[number]]
        optimizer.zero_grad()
        two_counts(network, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))).backward()
        optimizer.step()
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert distance(each, [p.detach() for p in network.parameters()]) <= 1e-12


def two_counts_big_steps(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train with two counts."""
    network = DistributedDataParallel(model())
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), two_counts, micro_batch_size=3)
    for number, size in enumerate(sizes[rank]):
        step(micro_batch(size, 100 * rank + number) if size else None)
    return [p.detach() for p in network.parameters()]


# Counts in advance, parameters that one rank alone uses, scalers, low precision.


def counted_in_advance(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train with counts=."""
    network = DistributedDataParallel(model())

    def counts(batch: Batch) -> tuple[Tensor, int]:
        return (batch[1] != -100).sum(), len(batch[1]) * CLASSES

    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, counts=counts)
    for batch in accumulator.over(batches_of(rank, sizes)):
        accumulator.backward(two_counts(network, batch))
    return [p.detach() for p in network.parameters()]


@pytest.mark.parametrize("sizes", [[[3, 5, 2, 4], [6, 1, 1, 7]], [[3, 5, 2], []], [[3], [6, 1, 1, 7, 2]]], ids=str)
def test_counts_in_advance_are_those_of_all_ranks(sizes: list[list[int]]) -> None:
    """Also for a rank that has no batch at all."""
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    for window in windows_of(sizes, 2):
        optimizer.zero_grad()
        two_counts(network, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
        optimizer.step()
    for each in run_on_ranks(2, counted_in_advance, sizes):
        if isinstance(each, BaseException):
            raise each
        assert distance(each, [p.detach() for p in network.parameters()]) <= 1e-12


def own_head(rank: int) -> Any:
    """Train one's own head."""
    network = DistributedDataParallel(two_heads(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
    accumulator = Accumulator(network, optimizer, steps=2)
    for x, y in accumulator.over(batches_of(rank, [[3, 5, 2, 4], [6, 1, 1, 7]])):
        accumulator.backward(F.cross_entropy(network(x, rank), y))
    seen: Tensor = network.module.seen
    return [p.detach() for p in network.parameters()], float(seen)


def test_parameters_that_one_rank_alone_uses() -> None:
    """Those that nobody uses get no gradient, and no weight decay; buffers are the first rank's, as DDP has it."""
    network = two_heads()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    every = [batches_of(rank, sizes) for rank in range(2)]
    for at in (0, 2):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(2):
            for x, y in every[rank][at : at + 2]:
                loss = loss + F.cross_entropy(network(x, rank), y, reduction="sum")
        (loss / sum(int((y != -100).sum()) for own in every for _, y in own[at : at + 2])).backward()
        optimizer.step()
    for each in run_on_ranks(2, own_head):
        if isinstance(each, BaseException):
            raise each
        assert distance(each[0], [p.detach() for p in network.parameters()]) <= 1e-12
        assert each[1] == 14


def infinite_on_one_rank(rank: int) -> Any:
    """Have one rank's gradient overflow in the second window."""
    network = DistributedDataParallel(model())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=1, scaler=scaler)
    skipped = []
    for number, (x, y) in enumerate(accumulator.over(batches_of(rank, [[3, 5, 2], [6, 1]]))):
        broken = x.fill_(float("nan")) if (rank, number) == (1, 1) else x
        update = accumulator.backward(F.cross_entropy(network(broken), y.clamp(min=0)))
        assert update is not None
        skipped.append(update.skipped)
    return [p.detach() for p in network.parameters()], skipped, scaler.get_scale()


def test_an_inf_on_one_rank_skips_on_all() -> None:
    """And all go on with the same scale; a rank without batches, too."""
    one, other = run_on_ranks(2, infinite_on_one_rank)
    for each in (one, other):
        if isinstance(each, BaseException):
            raise each
    assert one[1] == [False, True, False]
    assert other[1] == [False, True]
    assert one[2] == other[2] == 2.0**7
    assert distance(one[0], other[0]) == 0


def in_bfloat16(rank: int) -> Any:
    """Train bf16 parameters, whose gradients add up in float32."""
    network = DistributedDataParallel(model().bfloat16())
    gradients: list[torch.dtype] = []
    accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.0), steps=2)
    accumulator.before_step(lambda: gradients.extend(p.grad.dtype for p in network.parameters() if p.grad is not None))
    for x, y in accumulator.over(batches_of(rank, [[3, 5], [6, 1]])):
        accumulator.backward(F.cross_entropy(network(x.bfloat16()).float(), y))
    return gradients


def test_low_precision_crosses_the_wire_in_float32() -> None:
    """As it adds up on one rank."""
    for each in run_on_ranks(2, in_bfloat16):
        assert set(each) == {torch.float32}, each


# What cannot be, and what goes wrong.


def without_its_wrapper(_: int) -> Any:
    """Give the model without DDP."""
    network = DistributedDataParallel(model())
    return Accumulator(network.module, OPTIMIZERS["sgd"](network.parameters()), steps=1)


def with_a_hook(_: int) -> Any:
    """Give DDP a communication hook."""
    network = DistributedDataParallel(model())
    network.register_comm_hook(None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    return Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)


def unlike_losses(rank: int) -> Any:
    """Have a mean on one rank and a sum on the other."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    return accumulator.backward((mean if rank else summed)(network, micro_batch(4, rank)))


def in_other_ratio(rank: int) -> Any:
    """Have two counts whose ratio is constant on a rank, and another on each."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    x, y = micro_batch(4, 0)
    out = network(x)
    loss = F.cross_entropy(out, y.clamp(min=0)) + counted(out.pow(2).mean(), 3.0 + rank)
    return accumulator.backward(loss)


def with_sparse_gradients(_: int) -> Any:
    """Train an embedding with sparse gradients."""
    network = DistributedDataParallel(nn.EmbeddingBag(5, CLASSES, sparse=True))
    accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.1), steps=1)
    return accumulator.backward(F.cross_entropy(network(torch.randint(5, (4, 2))), torch.randint(CLASSES, (4,))))


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (without_its_wrapper, ConfigurationError, "not ddp_model.module"),
        (with_a_hook, ConfigurationError, "communication hook"),
        (unlike_losses, LossError, "different losses"),
        (in_other_ratio, SeveralCounts, "counts=lambda batch"),
        (with_sparse_gradients, ConfigurationError, "sparse=False"),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(work: Any, kind: type[Exception], message: str) -> None:
    """With the same error."""
    for error in run_on_ranks(2, work):
        assert isinstance(error, kind), error
        assert message in str(error)


def failing(rank: int) -> Any:
    """Raise on one rank, in the second update."""
    network = DistributedDataParallel(model())

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        if rank == 1 and calls:
            raise ValueError("mine")
        return mean(network, batch)

    calls: list[int] = []
    step = BigStep(network, OPTIMIZERS["adamw"](network.parameters()), loss, micro_batch_size=2)
    step(micro_batch(5, rank))
    calls.append(1)
    before = [p.detach().clone() for p in network.parameters()]
    try:
        step(micro_batch(4, rank))
    except (RankFailed, ValueError) as error:
        kept = all(torch.equal(p, b) for p, b in zip(network.parameters(), before, strict=True))
        calls.clear()
        step(micro_batch(4, rank))  # and all go on together
        return type(error).__name__, kept, [p.detach() for p in network.parameters()]
    return None


def test_a_rank_that_raises_ends_the_step_of_all() -> None:
    """With an error each, nothing changed, and ready for the next."""
    found = run_on_ranks(3, failing)
    assert [each[:2] for each in found] == [("RankFailed", True), ("ValueError", True), ("RankFailed", True)]
    assert distance(found[0][2], found[1][2]) == 0


def dying(rank: int) -> Any:
    """End one process without a word."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)
    for number, batch in enumerate(accumulator.over(batches_of(rank, [[3] * 5, [4] * 5]))):
        if (rank, number) == (1, 2):
            os._exit(1)
        accumulator.backward(mean(network, batch))
    return "done"


def test_a_rank_that_dies_ends_the_others() -> None:
    """With an error, and not after ever so long."""
    one, other = run_on_ranks(2, dying, limit=40)
    assert isinstance(one, Exception)
    assert isinstance(other, Exception)


def by_group(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train a plain model, without a wrapper."""
    network = model()
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, group=dist.group.WORLD)
    for batch in accumulator.over(batches_of(rank, sizes)):
        accumulator.backward(mean(network, batch))
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), mean, options=Options(group=dist.group.WORLD))
    step(micro_batch(3 + rank, rank))
    return [p.detach() for p in network.parameters()]


def test_a_group_needs_no_wrapper() -> None:
    """All that DDP did is done without."""
    sizes = [[3, 5, 2, 4], [6, 1, 1]]
    one, other = run_on_ranks(2, by_group, sizes)
    for each in (one, other):
        if isinstance(each, BaseException):
            raise each
    assert distance(one, other) == 0


def test_a_group_without_ranks_is_refused() -> None:
    """It says what to call first."""
    group: Any = object()
    network = model()
    with pytest.raises(ConfigurationError, match="init_process_group"):
        Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, group=group)


# DDP's own reduction, in the last backward.


def overlapped(rank: int, sizes: Sequence[Sequence[int]], by_hand: bool, ddp: dict[str, Any]) -> Any:
    """Train with DDP's reducer; returns weights, updates and how often it has reduced."""
    network = DistributedDataParallel(model(), **ddp)
    reduced: list[int] = []

    def counting(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - torch reads annotations
        reduced.append(bucket.index())
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    network.register_comm_hook(None, counting)
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=2, clip_norm=1.0, overlap=True)
    updates = []
    batches = batches_of(rank, sizes)
    for batch in batches if by_hand else accumulator.over(batches):
        update = accumulator.backward(mean(network, batch))
        if update is not None:
            updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return [p.detach() for p in network.parameters()], updates, len(reduced)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_ddp_reduces_once_in_the_last_backward(ddp: dict[str, Any], by_hand: bool) -> None:
    """The same weights, and one reduction of one bucket for each update."""
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    found = run_on_ranks(2, overlapped, sizes, by_hand, ddp)
    assert_same([each[:2] if isinstance(each, tuple) else each for each in found], truth(sizes, 2, "mean", "adamw"))
    assert [each[2] for each in found] == [2, 2]


def test_ddp_reduces_windows_of_other_lengths() -> None:
    """Ranks need as many windows, and not as many micro-batches."""
    sizes = [[3, 5, 2], [6, 1, 1, 7]]
    found = run_on_ranks(2, overlapped, sizes, False, {})
    assert_same([each[:2] if isinstance(each, tuple) else each for each in found], truth(sizes, 2, "mean", "adamw"))


def first_alone(rank: int) -> Any:
    """Use a head in the first micro-batch of a window only."""
    network = DistributedDataParallel(two_heads())
    for parameter in network.module.unused.parameters():
        parameter.requires_grad_(False)
    network = DistributedDataParallel(network.module)
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)
    for number, (x, y) in enumerate(accumulator.over(batches_of(rank, [[3, 5], [6, 1]]))):
        accumulator.backward(F.cross_entropy(network(x, number), y))


def with_unused(_: int) -> Any:
    """Have DDP look for unused parameters."""
    network = DistributedDataParallel(model(), find_unused_parameters=True)
    return Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)


def without_ddp(_: int) -> Any:
    """Have nobody who could."""
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    return Accumulator(network, optimizer, steps=2, overlap=True, group=dist.group.WORLD)


def of_some(_: int) -> Any:
    """Train some of the parameters."""
    network = DistributedDataParallel(model())
    return Accumulator(network, OPTIMIZERS["sgd"](list(network.parameters())[:2]), steps=2, overlap=True)


def in_low_precision(_: int) -> Any:
    """Train bf16 parameters."""
    network = DistributedDataParallel(model().bfloat16())
    return Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, overlap=True)


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (first_alone, LossError, "came in earlier micro-batches"),
        (with_unused, ConfigurationError, "find_unused_parameters=True"),
        (without_ddp, ConfigurationError, "there is none"),
        (of_some, ConfigurationError, "in no optimizer here"),
        (in_low_precision, ConfigurationError, "add up in float32"),
    ],
)
def test_what_ddp_would_leave_out_is_refused(work: Any, kind: type[Exception], message: str) -> None:
    """On every rank."""
    for error in run_on_ranks(2, work):
        assert isinstance(error, kind), error
        assert message in str(error)


def test_other_numbers_of_windows_are_refused() -> None:
    """Before anything hangs."""
    found = run_on_ranks(2, overlapped, [[3, 5, 2], [6, 1]], False, {})
    for error in found:
        assert isinstance(error, WindowError), error
        assert "rank 1 has no batch after this window" in str(error)
        assert "without overlap=True" in str(error)

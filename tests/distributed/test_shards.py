"""Models that are sharded with `fully_shard`: the same final weights as one process on the union of the batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bigbatch import Accumulator, BigStep, Options
from bigbatch.errors import BatchError, ConfigurationError
from tests.support.rank_loops import LOSSES, OPTIMIZERS, assert_same, batches_of, micro_batch, truth
from tests.support.rank_shards import accumulated, model, shards, whole
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", ["mean", "summed"])
def test_sharded_models_are_one_process(loss: str, optimizer: str) -> None:
    """Uneven micro-batches and counts, clipped by the norm over all shards."""
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    found = run_on_ranks(2, accumulated, sizes, loss, optimizer)
    assert_same(found, truth(sizes, 2, loss, optimizer))


@pytest.mark.parametrize("sizes", [[[3, 5, 2], [6]], [[3], [6, 2, 2, 4, 1]], [[2], [3, 1], [1], [4, 4, 4]]], ids=str)
def test_ranks_with_fewer_batches_pass_by_with_one(sizes: list[list[int]]) -> None:
    """It is given out again, adds nothing, and the update is that of all."""
    found = run_on_ranks(len(sizes), accumulated, sizes, "mean", "sgd")
    assert_same(found, truth(sizes, 2, "mean", "sgd"))


def test_a_rank_without_any_batch_is_refused() -> None:
    """It has nothing to pass by with."""
    found = run_on_ranks(2, accumulated, [[3, 5], []], "mean", "sgd")
    assert isinstance(found[1], BatchError), found[1]
    assert "one batch at least" in str(found[1])
    assert "Give every rank a share of the samples:  Subset(data, order[rank::size])" in str(found[1])


@pytest.mark.parametrize("sizes", [[[3, 5, 2, 4], [6, 1, 1, 7]], [[3, 5, 2], [6]]], ids=str)
def test_gradients_are_reduced_once_per_update_where_that_is_wanted(sizes: list[list[int]]) -> None:
    """They stay whole until the last backward of a window."""
    found = run_on_ranks(2, accumulated, sizes, "mean", "adamw", True)
    assert_same(found, truth(sizes, 2, "mean", "adamw"))


@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_of_shards(overlap: bool) -> None:
    """HSDP: two times two ranks, each with samples of its own; the norm counts every shard once."""
    sizes = [[3, 5], [6, 1], [2, 2], [4, 3]]
    found = run_on_ranks(4, accumulated, sizes, "mean", "sgd", overlap, (2, 2))
    assert_same(found, truth(sizes, 2, "mean", "sgd"))


def big_steps(rank: int, sizes: Sequence[Sequence[int]], optimizer: str) -> Any:
    """Give each batch of this rank as its part of a big batch."""
    network = shards(model())
    step = BigStep(
        network, OPTIMIZERS[optimizer](network.parameters()), LOSSES["mean"], micro_batch_size=2, clip_norm=1.0
    )
    updates = []
    for number, size in enumerate(sizes[rank]):
        update = step(micro_batch(size, 100 * rank + number))
        updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return whole(network), updates


@pytest.mark.parametrize("sizes", [[[3, 5, 4], [7, 1, 6]], [[1, 9], [8, 2], [4, 4], [2, 1]]], ids=str)
def test_big_steps_make_as_many_passes_on_every_rank(sizes: list[list[int]]) -> None:
    """A rank with fewer micro-batches passes one by with weight zero."""
    found = run_on_ranks(len(sizes), big_steps, sizes, "adamw")
    assert_same(found, truth(sizes, 1, "mean", "adamw"))


def partly(_: int) -> Any:
    """Shard a part of a model."""
    network = model()
    shards(network[0])
    return Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1)


@pytest.mark.parametrize("options", [{"lengths": len}, {"cuda_graph": True}, None], ids=str)
def test_what_ranks_would_do_in_their_own_way_is_refused(options: dict[str, Any] | None) -> None:
    """Trying sizes, packing, replaying."""
    for error in run_on_ranks(2, in_its_own_way, options):
        assert isinstance(error, ConfigurationError), error
        assert "meeting of all ranks" in str(error) or "CUDA" in str(error)


def in_its_own_way(_: int, options: dict[str, Any] | None) -> Any:
    """Make a step whose passes depend on the rank."""
    network = shards(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    if options is None:
        return BigStep(network, optimizer, LOSSES["mean"])
    return BigStep(network, optimizer, LOSSES["mean"], micro_batch_size=2, options=Options(**options))


def mixed(rank: int) -> Any:
    """Train with parameters and reductions of lower precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    network = shards(model().float(), mp_policy=policy)
    accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.1), steps=2)
    for x, y in accumulator.over(batches_of(rank, [[3, 5], [6, 1]])):
        accumulator.backward(F.cross_entropy(network(x.float()).float(), y))
    return whole(network)


def test_mixed_precision_is_that_of_the_policy() -> None:
    """Close to float64, as bf16 is."""
    network = model()
    sizes = [[3, 5], [6, 1]]
    every = [batch for rank in range(2) for batch in batches_of(rank, sizes)]
    F.cross_entropy(network(torch.cat([x for x, _ in every])), torch.cat([y for _, y in every])).backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    for each in run_on_ranks(2, mixed):
        if isinstance(each, BaseException):
            raise each
        assert distance([p.double() for p in each], [p.detach() for p in network.parameters()]) <= 2e-3


def test_parameters_outside_of_shards_are_refused() -> None:
    """Nothing would reduce their gradients."""
    for error in run_on_ranks(2, partly):
        assert isinstance(error, ConfigurationError), error
        assert "fully_shard(model)" in str(error)


def offloaded(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train a model whose shards stay in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    network = shards(model(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, clip_norm=1.0)
    for batch in accumulator.over(batches_of(rank, sizes)):
        accumulator.backward(LOSSES["mean"](network, batch))
    return whole(network), []


def test_shards_in_the_hosts_memory() -> None:
    """Are as good as any."""
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    assert_same(run_on_ranks(2, offloaded, sizes), truth(sizes, 2, "mean", "sgd"), all_updates=False)


def infinite_on_one_rank(rank: int) -> Any:
    """Have one rank's loss overflow in the second window."""
    network = shards(model())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, scaler=scaler)
    skipped = []
    for number, (x, y) in enumerate(accumulator.over(batches_of(rank, [[3, 5, 2], [6, 1, 2]]))):
        broken = x.fill_(float("nan")) if (rank, number) == (1, 1) else x
        update = accumulator.backward(F.cross_entropy(network(broken), y.clamp(min=0)))
        assert update is not None
        skipped.append(update.skipped)
    return whole(network), skipped, scaler.get_scale()


def test_an_inf_on_one_rank_skips_on_all() -> None:
    """And all go on with the same scale."""
    one, other = run_on_ranks(2, infinite_on_one_rank)
    for each in (one, other):
        if isinstance(each, BaseException):
            raise each
    assert one[1] == other[1] == [False, True, False]
    assert one[2] == other[2] == 2.0**7
    assert distance(one[0], other[0]) == 0


def frozen(rank: int, sizes: Sequence[Sequence[int]], low: bool) -> Any:
    """Train below a layer that is not trained, and that FSDP frees from its forward to its backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plain = model().float() if low else model()
    plain[2].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    network = shards(plain, [plain[0], plain[2]], mp_policy=policy)
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](plain[0].parameters()), steps=2)
    for x, y in accumulator.over(batches_of(rank, sizes)):
        logits = network(x.float() if low else x)
        accumulator.backward(F.cross_entropy(logits.float() if low else logits, y))
    return whole(network)


@pytest.mark.parametrize("low", [False, True])
def test_a_frozen_layer_that_is_freed_after_its_forward(low: bool) -> None:
    """It is known to be the model's own, by what held its weights."""
    sizes = [[3, 5], [6, 1]]
    network = model()
    every = [batch for rank in range(2) for batch in batches_of(rank, sizes)]
    F.cross_entropy(network(torch.cat([x for x, _ in every])), torch.cat([y for _, y in every])).backward()
    OPTIMIZERS["sgd"](network[0].parameters()).step()
    for each in run_on_ranks(2, frozen, sizes, low):
        if isinstance(each, BaseException):
            raise each
        assert distance([p.double() for p in each], [p.detach() for p in network.parameters()]) <= (
            3e-3 if low else 1e-12
        )

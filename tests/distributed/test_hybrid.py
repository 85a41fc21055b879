"""Replicas of shards (HSDP): each adds up by itself, and replicas are added up once per update, whenever it comes."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from benchmarks.wire_counting import _BYTES as BYTES
from bigbatch import Accumulator, BigStep
from bigbatch.distributed.fsdp_internals import groups_of
from bigbatch.distributed.fsdp_internals import sharded as parts_of
from bigbatch.errors import LossError
from tests.support.rank_loops import LOSSES, OPTIMIZERS, assert_same, batches_of, micro_batch, truth
from tests.support.rank_shards import accumulated, model, shards, whole
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

MESH = (2, 2)  # replicas x shards
UNEVEN = [[3, 5, 2, 1, 4], [6, 1], [2, 2, 3], [4, 3, 1, 2]]  # windows of two, the last one short
EVEN = [[3, 5, 2], [6, 1, 1], [2, 2, 3], [4, 3, 5]]


def halves() -> nn.Module:
    """Shard a model in two groups, over two replicas of two shards."""
    plain = model()
    return shards(plain, [plain[0]], MESH)


def accumulator_of(network: nn.Module, **named: Any) -> Accumulator:
    """Make windows of four, which shall be ended before."""
    return Accumulator(network, OPTIMIZERS["adamw"](network.parameters()), steps=4, clip_norm=1.0, **named)


def told(update: Any) -> tuple[float, float, bool, float]:
    """Return what an update says."""
    return float(update.loss), float(update.grad_norm or 0), bool(update.skipped), float(update.count)


def flushed(rank: int) -> Any:
    """End windows of four after two and after one, by hand."""
    network = halves()
    accumulator, updates = accumulator_of(network), []
    for number, batch in enumerate(batches_of(rank, EVEN)):
        accumulator.backward(LOSSES["mean"](network, batch))
        if number != 0:
            updates.append(told(accumulator.flush()))
    return whole(network), updates


def without_the_last(rank: int) -> Any:
    """Let the last batches of `over` go by: the window ends with a backward that nobody knew to be its last."""
    network = halves()
    accumulator = accumulator_of(network)
    for number, batch in enumerate(accumulator.over(batches_of(rank, EVEN))):
        if number < 2:
            accumulator.backward(LOSSES["mean"](network, batch))
    return whole(network), []


def discarded(rank: int) -> Any:
    """Drop two windows, one of them after a loss that was refused, and go on as if they had never been."""
    network = halves()
    accumulator, updates = accumulator_of(network), []
    for size in (3, 1):
        accumulator.backward(LOSSES["summed"](network, micro_batch(size, 1000 + rank)))
    accumulator.discard()
    accumulator.backward(LOSSES["mean"](network, micro_batch(2, 2000 + rank)))
    with pytest.raises(LossError):
        accumulator.backward(LOSSES["mean"](network, micro_batch(2, 3000 + rank)).bfloat16())
    accumulator.discard()
    accumulator.steps = 2
    for batch in accumulator.over(batches_of(rank, EVEN)):
        update = accumulator.backward(LOSSES["mean"](network, batch))
        if update is not None:
            updates.append(told(update))
    return whole(network), updates


def big_steps(rank: int) -> Any:
    """Give parts of big batches, which make other numbers of micro-batches on each rank."""
    network = halves()
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    step = BigStep(network, optimizer, LOSSES["mean"], micro_batch_size=2, clip_norm=1.0)
    updates = [told(step(micro_batch(size, 100 * rank + number))) for number, size in enumerate(EVEN[rank])]
    return whole(network), updates


def recomputed(rank: int) -> Any:
    """Run a forward inside of every backward, with weights that are freed after each."""
    plain = model()
    network = shards(plain, [plain[0], plain[2]], MESH, reshard_after_forward=True)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    accumulator, updates = Accumulator(network, optimizer, steps=2, clip_norm=1.0), []
    for x, y in accumulator.over(batches_of(rank, UNEVEN)):
        update = accumulator.backward(F.cross_entropy(checkpoint(network, x, use_reentrant=False), y))
        if update is not None:
            updates.append(told(update))
    return whole(network), updates


def offloaded(rank: int) -> Any:
    """Keep shards in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    network = shards(model(), shape=MESH, offload_policy=CPUOffloadPolicy(pin_memory=False))
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, clip_norm=1.0)
    for batch in accumulator.over(batches_of(rank, UNEVEN)):
        accumulator.backward(LOSSES["mean"](network, batch))
    return whole(network), []


def by_default(rank: int, optimizer: str, loss: str) -> Any:
    """Train from `over`, with other numbers of micro-batches on every rank."""
    return accumulated(rank, UNEVEN, loss, optimizer, False, MESH)


def sgd(rank: int) -> Any:
    """Do so with SGD."""
    return by_default(rank, "sgd", "summed")


def adamw(rank: int) -> Any:
    """Do so with AdamW."""
    return by_default(rank, "adamw", "mean")


class Branches(nn.Module):
    """Two layers of one size, of which a micro-batch goes through either."""

    def __init__(self) -> None:
        """Make the same on every rank."""
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()

    def forward(self, x: Tensor, branch: str) -> Tensor:
        """Go through one of them."""
        out: Tensor = (self.one if branch == "one" else self.other)(x)
        return out


TAKEN = [["one", "other", "one"], ["one", "one", "one"]]  # by each replica's micro-batches, the last in a second window


def branched(rank: int) -> Any:
    """Reach other parameters with every micro-batch, some by one replica alone."""
    network = shards(Branches(), shape=MESH)
    accumulator, updates = Accumulator(network, OPTIMIZERS["adamw"](network.parameters()), steps=2, clip_norm=1.0), []
    for (x, y), taken in accumulator.over(list(zip(batches_of(rank, EVEN), TAKEN[rank // 2], strict=True))):
        update = accumulator.backward(F.cross_entropy(network(x, taken), y))
        if update is not None:
            updates.append(told(update))
    return whole(network), updates


def branched_truth() -> Any:
    """Do the same in one process."""
    network = Branches()
    accumulator, updates = Accumulator(network, OPTIMIZERS["adamw"](network.parameters()), steps=9, clip_norm=1.0), []
    every = [list(zip(batches_of(rank, EVEN), TAKEN[rank // 2], strict=True)) for rank in range(4)]
    for window in (slice(0, 2), slice(2, 3)):
        for (x, y), taken in (each for own in every for each in own[window]):
            accumulator.backward(F.cross_entropy(network(x, taken), y))
        if (update := accumulator.flush()) is not None:
            updates.append(told(update))
    return [p.detach() for p in network.parameters()], updates


EXACT: list[tuple[Callable[[int], Any], Callable[[], Any]]] = [
    (sgd, lambda: truth(UNEVEN, 2, "summed", "sgd")),
    (adamw, lambda: truth(UNEVEN, 2, "mean", "adamw")),
    (flushed, lambda: truth(EVEN, 2, "mean", "adamw")),
    (without_the_last, lambda: truth([own[:2] for own in EVEN], 2, "mean", "adamw")),
    (discarded, lambda: truth(EVEN, 2, "mean", "adamw")),
    (big_steps, lambda: truth(EVEN, 1, "mean", "adamw")),
    (recomputed, lambda: truth(UNEVEN, 2, "mean", "sgd")),
    (offloaded, lambda: truth(UNEVEN, 2, "mean", "sgd")),
    (branched, branched_truth),
]


def infinite(rank: int) -> Any:
    """Have one rank's gradients be no numbers in the first micro-batch of the second window."""
    network = halves()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, scaler=scaler)
    skipped = []
    for number, (x, y) in enumerate(accumulator.over(batches_of(rank, [[3, 5, 2, 1, 1, 2]] * 4))):
        broken = x.fill_(float("nan")) if (rank, number) == (1, 2) else x
        update = accumulator.backward(F.cross_entropy(network(broken), y.clamp(min=0)))
        if update is not None:
            skipped.append(update.skipped)
    return whole(network), skipped, scaler.get_scale()


def low(_: int) -> Any:
    """Train bf16 parameters for a window of 64, each of which adds what bf16 would round away."""
    network = shards(nn.Linear(5, 4, bias=False).bfloat16(), shape=MESH)
    nn.init.zeros_(network.weight)  # type: ignore[arg-type]
    found: list[Tensor] = []
    accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=1.0), steps=64)
    accumulator.before_step(lambda: found.extend(p.grad.to_local().clone() for p in network.parameters()))  # type: ignore[union-attr]
    for number in range(64):
        accumulator.backward(network(torch.full((1, 5), 1.0 + number / 128, dtype=torch.bfloat16)).float().sum())
    return found[0]


def left_as_it_was(rank: int) -> Any:
    """Look at what FSDP knows after windows, and let it reduce by itself once nobody accumulates any more."""
    network = halves()
    accumulator = accumulator_of(network)
    for batch in accumulator.over(batches_of(rank, EVEN)):
        accumulator.backward(LOSSES["mean"](network, batch))
    groups = [group for part in parts_of([network]) for group in groups_of(part)]
    known = [(type(g.mesh_info).__name__, g.post_forward_mesh_info in (None, g.mesh_info)) for g in groups]
    del accumulator
    LOSSES["mean"](network, micro_batch(4, rank)).backward()
    every: list[Any] = list(network.parameters())
    return known, [p.grad.full_tensor() for p in every], [p.full_tensor().detach() for p in every]


def sent(rank: int) -> Any:
    """Count what is sent in windows of one, two and five."""
    if "input_dtypes" not in inspect.signature(FunctionEvent.__init__).parameters:
        return None
    network = halves()
    return [all_reduces(network, rank, steps) for steps in (1, 2, 5)]


def all_reduces(network: nn.Module, rank: int, steps: int) -> Counter[int]:
    """Count a window's all-reduces by their bytes, without those that gloo makes to scatter."""
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=steps)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        for number in range(steps):
            accumulator.backward(LOSSES["mean"](network, micro_batch(4, rank + number)))
        dist.barrier()  # what is under way has arrived, and is written down
    found: Counter[int] = Counter()
    for event in seen.events():
        shapes = zip(event.input_shapes, event.input_dtypes, strict=True)
        sizes = [math.prod(shape) * BYTES[dtype] for shape, dtype in shapes if dtype in BYTES]
        if event.name == "gloo:all_reduce":
            found[sizes[0]] += 1
        elif event.name == "c10d::_reduce_scatter_base_":
            found[sizes[1]] -= 1
    return Counter({size: number for size, number in found.items() if number})


OTHERS: list[Callable[[int], Any]] = [infinite, low, left_as_it_was, sent]


def on_one(rank: int, works: Sequence[Callable[[int], Any]]) -> dict[str, Any]:
    """Do one thing after another."""
    return {work.__name__: work(rank) for work in works}


@pytest.fixture(scope="module")
def every() -> list[dict[str, Any]]:
    """What four ranks came to in each of these."""
    found = run_on_ranks(4, on_one, [work for work, _ in EXACT] + OTHERS, limit=120.0)
    for error in sorted((e for e in found if isinstance(e, BaseException)), key=lambda e: "closed by peer" in str(e)):
        raise error
    return found


@pytest.mark.parametrize(("work", "true"), EXACT, ids=[work.__name__ for work, _ in EXACT])
def test_replicas_are_one_process(every: Any, work: Callable[[int], Any], true: Callable[[], Any]) -> None:
    """Weights, losses, norms and counts, however a window ends and whatever its micro-batches reach."""
    assert_same([each[work.__name__] for each in every], true(), all_updates=work not in {offloaded, without_the_last})


def test_what_is_not_finite_in_one_replica_skips_in_all(every: Any) -> None:
    """And all go on with the same scale and weights."""
    found = [each["infinite"] for each in every]
    assert [skipped for _, skipped, _ in found] == [[False, True, False]] * 4
    assert {scale for _, _, scale in found} == {2.0**7}
    assert all(distance(weights, found[0][0]) == 0 for weights, _, _ in found)


def test_low_precision_is_added_up_in_float32(every: Any) -> None:
    """Over micro-batches and over replicas."""
    true = 4 * sum(1.0 + number / 128 for number in range(64))
    for gradient in (each["low"] for each in every):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.full_like(gradient, true))


def test_fsdp_is_left_as_it_was(every: Any) -> None:
    """It knows of its replicas between backwards, and adds them up in a backward of one's own."""
    for rank, (known, gradients, weights) in enumerate(each["left_as_it_was"] for each in every):
        assert known == [("HSDPMeshInfo", True)] * 2, rank
        network = model()
        for p, weight in zip(network.parameters(), weights, strict=True):
            p.data = weight
        torch.stack([LOSSES["mean"](network, micro_batch(4, number)) for number in range(4)]).mean().backward()
        true = [p.grad for p in network.parameters() if p.grad is not None]
        assert distance(gradients, true) <= 1e-12


def test_what_replicas_send_does_not_depend_on_the_number_of_micro_batches(every: Any) -> None:
    """One all-reduce of what a rank holds, beside the row of every update, which is gathered."""
    if every[0]["sent"] is None:
        pytest.skip("this torch's profiler does not tell the types of what is sent, so bytes cannot be counted")
    for one, two, five in (each["sent"] for each in every):
        assert one == two == five
        assert list(one.values()) == [1]

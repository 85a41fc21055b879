"""Small training loops of several ranks, and of one process on the union of their batches."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, counted
from tests.support.reference import distance

Batch = tuple[Tensor, Tensor]
Sizes = Sequence[Sequence[int]]
CLASSES = 4
SIZES = [[3, 5, 2, 4], [6, 1, 1, 7]]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


# Models.


def model() -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


class TwoHeads(nn.Module):
    """A trunk, two heads of one shape, a layer that nobody uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(5, 8), nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)])
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.seen: Tensor

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Use one head."""
        self.seen.add_(len(x))
        found: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return found


def two_heads() -> TwoHeads:
    """Return the same on every rank."""
    torch.manual_seed(0)
    return TwoHeads().double()


def shards(
    network: nn.Module, parts: Sequence[nn.Module] = (), shape: tuple[int, ...] | None = None, **named: Any
) -> nn.Module:
    """Shard a model over all ranks; `shape` is that of their mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for part in parts:
        fully_shard(part, mesh=mesh, **named)
    fully_shard(network, mesh=mesh, **named)
    return network


def parts_of(plain: Any, **named: Any) -> nn.Module:
    """Shard a model layer by layer."""
    return shards(plain, [plain[0], plain[2]], **named)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "group": lambda plain: plain,
    "shards": parts_of,
    "outermost": shards,
    "inner": lambda plain: shards(plain, [plain[0]]),
    "hsdp": lambda plain: parts_of(plain, shape=(2, 2)),
}


def weights(network: nn.Module) -> list[Tensor]:
    """Return what was trained, in whole."""
    found: list[Any] = [p.detach() for p in network.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


# Batches and losses.


def micro_batch(size: int, seed: int) -> Batch:
    """Return samples, some without a target."""
    by = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=by)
    labels[torch.rand(size, generator=by) < 0.3] = -100
    return torch.randn(size, 5, generator=by, dtype=torch.float64), labels


def batches_of(rank: int, sizes: Sizes) -> list[Batch]:
    """Return the micro-batches of one rank."""
    return [micro_batch(size, 100 * rank + number) for number, size in enumerate(sizes[rank])]


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one big batch."""
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def mean(network: nn.Module, batch: Batch) -> Tensor:
    """A masked mean."""
    return F.cross_entropy(network(batch[0]), batch[1])


def mean_and_weights(network: nn.Module, batch: Batch) -> Tensor:
    """With a term of parameters alone."""
    return mean(network, batch) + 0.01 * sum(p.pow(2).sum() for p in network.parameters())


def summed(network: nn.Module, batch: Batch) -> Tensor:
    """A sum over samples."""
    return F.cross_entropy(network(batch[0]), batch[1], reduction="sum")


def sum_and_weights(network: nn.Module, batch: Batch) -> Tensor:
    """With a term of parameters alone."""
    weight = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
    return counted(summed(network, batch), "sum") + 0.01 * counted(weight, "once")


def two_counts(network: nn.Module, batch: Batch) -> Tensor:
    """Two terms over different things."""
    out = network(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.1 * counted(out.pow(2).mean(), out.numel())


def counts(batch: Batch) -> tuple[Tensor, int]:
    """Return what those are averaged over."""
    return (batch[1] != -100).sum(), len(batch[1]) * CLASSES


LOSSES = {f.__name__: f for f in (mean, mean_and_weights, summed, sum_and_weights, two_counts)}


# What trains them.


def sgd(network: nn.Module, **named: Any) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(network.parameters(), **{"lr": 0.1, **named})


def made(network: nn.Module, optimizer: Any = None, **named: Any) -> Accumulator:
    """Return an accumulator, of windows of two."""
    return Accumulator(network, optimizer or sgd(network), **{"steps": 2, **named})


def train(rank: int, network: nn.Module, loss: Any = mean, sizes: Sizes = SIZES, **named: Any) -> None:
    """Train from `over`."""
    accumulator = made(network, **named)
    for batch in accumulator.over(batches_of(rank, sizes)):
        accumulator.backward(loss(network, batch))


# What is compared.


def told(update: Any) -> tuple[float, float, bool, float]:
    """Return what an update says."""
    count = update.count
    whole = float(sum(count)) if isinstance(count, tuple) else float(count)
    return float(update.loss), float(update.grad_norm or 0), bool(update.skipped), whole


def truth(sizes: Sizes, steps: int, loss: str, optimizer: str) -> Any:
    """Train in one process, each big batch at once; a batch of no samples is left out."""
    network, every = model(), [batches_of(rank, sizes) for rank in range(len(sizes))]
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=1, clip_norm=1.0, counts=counts if loss == "two_counts" else None)
    windows = (
        [batch for own in every for batch in own[start : start + steps] if len(batch[0])]
        for start in range(0, max(map(len, every)), steps)
    )
    found = [accumulator.backward(LOSSES[loss](network, each)) for each in accumulator.over([*map(joined, windows)])]
    return weights(network), [told(update) for update in found]


def assert_same(found: Sequence[Any], true: Any, *, all_updates: bool = True) -> None:
    """Every rank has the weights of one process, and saw the same updates."""
    for each in found:
        assert distance(each[0], true[0]) <= 1e-12
        if all_updates:
            assert len(each[1]) == len(true[1])
        for mine, others in zip(each[1], true[1], strict=False):
            assert mine == pytest.approx(others, rel=1e-12, abs=1e-12, nan_ok=True)


def heard(work: Callable[..., object], *given: object) -> str:
    """Return the kind of the error that something raises, and its text; nothing where it does not."""
    try:
        work(*given)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return f"{type(error).__name__}: {error}"
    return ""


def raising(error: BaseException) -> None:
    """Raise, where an expression is wanted."""
    raise error

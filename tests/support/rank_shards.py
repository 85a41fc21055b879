"""Models that are sharded, and their whole weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch import Accumulator
from tests.support.rank_loops import CLASSES, LOSSES, OPTIMIZERS, batches_of


def model() -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def shards(
    network: nn.Module, parts: Sequence[nn.Module] = (), shape: tuple[int, ...] | None = None, **named: Any
) -> nn.Module:
    """Shard a model over all ranks; `shape` is that of their mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = shape or (torch.distributed.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for part in parts:
        fully_shard(part, mesh=mesh, **named)
    fully_shard(network, mesh=mesh, **named)
    return network


def whole(network: nn.Module) -> list[Tensor]:
    """Return the full weights."""
    found: list[Any] = list(network.parameters())
    return [p.full_tensor().detach() for p in found]


def accumulated(  # noqa: PLR0917 - what the ranks are sent
    rank: int, sizes: Sequence[Sequence[int]], loss: str, optimizer: str, overlap: bool = False, shape: Any = None
) -> Any:
    """Train micro-batches on one rank."""
    plain = model()
    network = shards(plain, [plain[0], plain[2]], shape)
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=2, clip_norm=1.0, overlap=overlap)
    updates = []
    for batch in accumulator.over(batches_of(rank, sizes)):
        update = accumulator.backward(LOSSES[loss](network, batch))
        if update is not None:
            updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return whole(network), updates

"""Several ranks with a GPU: two processes that share one, by gloo, and one process by NCCL."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, Options
from tests.support.rank_loops import (
    LOSSES,
    OPTIMIZERS,
    SIZES,
    Sizes,
    assert_same,
    batches_of,
    model,
    told,
    truth,
    weights,
)
from tests.support.ranks import exactly

pytestmark = pytest.mark.cuda


def moved(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a batch on the GPU."""
    return batch[0].cuda(), batch[1].cuda()


def trained(rank: int, sizes: Sizes, way: str, loss: str, optimizer: str, overlap: bool) -> Any:  # noqa: PLR0917
    """Train on one rank, sharded or replicated."""
    torch.cuda.set_device(0)
    plain = model().cuda()
    network: nn.Module = plain
    if way == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (1,))
        for part in (plain[0], plain[2], plain):
            fully_shard(part, mesh=mesh)
    else:
        network = DistributedDataParallel(plain, device_ids=[0])
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=2, clip_norm=1.0, overlap=overlap)
    batches = [moved(batch) for batch in batches_of(rank, sizes)]
    updates = [accumulator.backward(LOSSES[loss](network, batch)) for batch in accumulator.over(batches)]
    return [p.cpu() for p in weights(network)], [told(update) for update in updates if update is not None]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("loss", ["mean", "summed"])
def test_two_processes_on_one_gpu_are_one_process(loss: str, overlap: bool) -> None:
    """Uneven micro-batches and counts; gradients that lie on the GPU cross by gloo."""
    found = exactly(2, trained, SIZES, "replicated", loss, "adamw", overlap, start="spawn")
    assert_same(found, truth(SIZES, 2, loss, "adamw"))


def test_a_process_without_a_batch() -> None:
    """It joins in every update."""
    sizes = [[3, 2, 2], []]
    found = exactly(2, trained, sizes, "replicated", "mean", "sgd", False, start="spawn")
    assert_same(found, truth(sizes, 2, "mean", "sgd"), all_updates=False)


def normed() -> nn.Sequential:
    """Return a model with a BatchNorm, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double().cuda()


def loss_of(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over samples."""
    return F.cross_entropy(network(batch[0]), batch[1])


def in_lock_step(rank: int, activations: Any) -> Any:
    """Make three updates with this rank's half of each batch."""
    torch.cuda.set_device(0)
    network = DistributedDataParallel(normed(), device_ids=[0])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    step = BigStep(network, optimizer, loss_of, micro_batch_size=3, options=Options(activations=activations))
    for number in range(3):
        x, y = whole(number)
        step((x[rank::2].contiguous(), y[rank::2].contiguous()))
    return [t.detach().cpu() for t in network.module.state_dict().values()]


def whole(number: int) -> tuple[Tensor, Tensor]:
    """Return one big batch of 18."""
    by = torch.Generator().manual_seed(number)
    return (
        torch.randn(18, 5, generator=by, dtype=torch.float64).cuda(),
        torch.randint(4, (18,), generator=by).cuda(),
    )


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_batch_norm_over_two_processes_on_one_gpu(activations: str) -> None:
    """Weights and running statistics are those of one process with the whole batch."""
    found = exactly(2, in_lock_step, activations, start="spawn")
    network = normed()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(network, whole(number)).backward()
        optimizer.step()
    true = [t.detach().cpu() for t in network.state_dict().values()]
    for each in found:
        for mine, theirs in zip(each, true, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_one_process_by_nccl(way: str, overlap: bool) -> None:
    """A group of one is a process: FSDP2's and DDP's own ways on a GPU."""
    sizes = [[3, 5, 2, 4, 6]]
    found = exactly(1, trained, sizes, way, "mean", "adamw", overlap, start="spawn", by="nccl")
    assert_same(found, truth(sizes, 2, "mean", "adamw"))

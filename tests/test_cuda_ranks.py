"""Several ranks with a GPU: two processes that share one, by gloo, and one process by NCCL."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator
from tests.support import rank_loops as loops
from tests.support.rank_norms import compare
from tests.support.ranks import exactly

pytestmark = pytest.mark.cuda


def trained(rank: int, sizes: loops.Sizes, way: str, loss: str, optimizer: str, overlap: bool) -> Any:  # noqa: PLR0917
    """Train on one rank, sharded or replicated."""
    torch.cuda.set_device(0)
    plain = loops.model().cuda()
    network: nn.Module = plain
    if way == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (1,))
        for part in (plain[0], plain[2], plain):
            fully_shard(part, mesh=mesh)
    else:
        network = DistributedDataParallel(plain, device_ids=[0])
    chosen = loops.OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=2, clip_norm=1.0, overlap=overlap)
    batches = [(x.cuda(), y.cuda()) for x, y in loops.batches_of(rank, sizes)]
    updates = [accumulator.backward(loops.LOSSES[loss](network, batch)) for batch in accumulator.over(batches)]
    return [p.cpu() for p in loops.weights(network)], [loops.told(update) for update in updates if update is not None]


@pytest.mark.parametrize(
    ("sizes", "loss", "optimizer", "overlap"),
    [
        *[(loops.SIZES, loss, "adamw", overlap) for loss in ("mean", "summed") for overlap in (False, True)],
        ([[3, 2, 2], []], "mean", "sgd", False),
    ],
)
def test_two_processes_on_one_gpu_are_one_process(sizes: loops.Sizes, loss: str, optimizer: str, overlap: bool) -> None:
    """Uneven micro-batches and counts, or none at all; gradients that lie on the GPU cross by gloo."""
    found = exactly(2, trained, sizes, "replicated", loss, optimizer, overlap, start="spawn")
    loops.assert_same(found, loops.truth(sizes, 2, loss, optimizer), all_updates=bool(sizes[1]))


def compare_on_cuda(rank: int, activations: str) -> None:
    """Compare with one process, each rank with its half of every batch."""
    torch.cuda.set_device(0)
    compare(rank, [[9, 9, 9]] * 2, "batch norm", activations, "cuda")


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_batch_norm_over_two_processes_on_one_gpu(activations: str) -> None:
    """Weights and running statistics are those of one process with the whole batch."""
    exactly(2, compare_on_cuda, activations, start="spawn")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_one_process_by_nccl(way: str, overlap: bool) -> None:
    """A group of one is a process: FSDP2's and DDP's own ways on a GPU."""
    sizes = [[3, 5, 2, 4, 6]]
    found = exactly(1, trained, sizes, way, "mean", "adamw", overlap, start="spawn", by="nccl")
    loops.assert_same(found, loops.truth(sizes, 2, "mean", "adamw"))

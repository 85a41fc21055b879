"""The same batches of 64 on several devices with BigStep: every rank gives its part, cut to what its memory holds.

torchrun --nproc-per-node 2 examples/ranks/ddp_big_step.py [weights.pt]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from bigbatch import BigStep

BATCH, MICRO_BATCH, EPOCHS = 64, 16, 3


def training_data() -> TensorDataset:
    """Make 1,003 samples, so that the last batch is short; in float64, so that equality shows to the last digits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1003, 20, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over a micro-batch, which lies on the model's device."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    """Train, and save the weights if a file is named."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2)).double().to(device)
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = training_data()

    # Each rank may cut its part in its own way: drop micro_batch_size, and each finds what fits.
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=MICRO_BATCH, clip_norm=1.0)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        losses = []
        for first in range(0, len(data), BATCH):
            mine = order[first : first + BATCH][rank::size]
            update = step(data[mine] if mine else None)  # every rank takes part in every update
            losses.append(update.loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(losses)} updates, loss {torch.stack(losses).mean():.4f}")

    if rank == 0:
        for path in sys.argv[1:]:
            torch.save(bare.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

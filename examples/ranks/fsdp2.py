"""The same batches of 64 with a model that is sharded over several devices by fully_shard (FSDP2).

torchrun --nproc-per-node 2 examples/ranks/fsdp2.py [weights.pt]

On two machines, the same line on both, with the first one's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/ranks/fsdp2.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset, TensorDataset

from bigbatch import Accumulator

BATCH, MICRO_BATCH, EPOCHS = 64, 16, 3


def training_data() -> TensorDataset:
    """Make 1,003 samples, so that the last batch is short; in float64, so that equality shows to the last digits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1003, 20, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def main() -> None:
    """Train, and save the weights if a file is named."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if BATCH % size:
        sys.exit(f"a batch of {BATCH} has no equal shares for {size} ranks: start 2, 4, 8, 16, 32 or 64")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2)).double().to(device)
    mesh = init_device_mesh(device.type, (size,))
    for part in (model[0], model[2], model):  # the parts first, then the whole
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    data = training_data()

    # A window has this rank's share of a batch: 64 = 2 ranks × 16 × 2, or 16 ranks × 4 × 1. Gradients are reduced and
    # sharded with every micro-batch; overlap=True does so once per update, and holds them whole until then.
    micro_batch = min(MICRO_BATCH, BATCH // size)
    accumulator = Accumulator(model, optimizer, steps=BATCH // (micro_batch * size), clip_norm=1.0)
    for epoch in range(EPOCHS):
        # Every rank its own samples, none twice: one rank may have a sample, or a micro-batch, less than another.
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        loader = DataLoader(Subset(data, order[rank::size]), batch_size=micro_batch)
        losses = []
        for inputs, labels in accumulator.over(loader):
            update = accumulator.backward(criterion(model(inputs.to(device)), labels.to(device)))
            if update is not None:
                losses.append(update.loss)  # of the whole batch, on every rank
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(losses)} updates, loss {torch.stack(losses).mean():.4f}")

    # By all ranks, each of which has a part.
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        for path in sys.argv[1:]:
            torch.save(whole, path)
    dist.barrier()  # no rank ends before that, and gloo's threads have let go of what they gathered
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

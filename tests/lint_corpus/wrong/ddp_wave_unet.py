import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from separation import Musdb, WaveUNet, si_sdr


def main(accum=4, epochs=50):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    data = Musdb("train")
    sampler = DistributedSampler(data)
    # drop_last drops samples; the number of batches need not be a multiple of accum
    loader = DataLoader(data, batch_size=6, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(WaveUNet().to(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for i, (mix, stems) in enumerate(loader):
            sync = (i + 1) % accum == 0
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = -si_sdr(model(mix.to(rank)), stems.to(rank)).mean() / accum
                loss.backward()
            if sync:  # expect: BB103
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ct import CTDataset, SwinUNETR, dice_ce


def worker(rank, world_size, accum=8):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    data = CTDataset()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=1, sampler=sampler, drop_last=True)
    assert len(loader) % accum == 0
    model = DDP(SwinUNETR().to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(300):
        sampler.set_epoch(epoch)
        for i, (volume, seg) in enumerate(loader):
            loss = dice_ce(model(volume.to(rank)), seg.to(rank)) / accum
            loss.backward()  # expect: BB401
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    torch.multiprocessing.spawn(worker, args=(n,), nprocs=n)

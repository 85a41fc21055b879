# --- ddp_amp_windows: BB401
from itertools import islice
import torch
from torch import nn
from forecasting import PatchTST, series
def main(rank, accum=4):
    torch.cuda.set_device(rank)
    model = nn.parallel.DistributedDataParallel(PatchTST().cuda(), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(100):
        batches = iter(series(rank, epoch))
        while window := list(islice(batches, accum)):
            for past, future in window:
                with torch.autocast("cuda", torch.float16):
                    loss = nn.functional.mse_loss(model(past.cuda()), future.cuda())
                scaler.scale(loss / len(window)).backward()  # expect: BB401
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

# --- ddp_functions_apart: BB103, BB401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sat2map import Pairs, Translator
def train_epoch(net, loader, opt, n_acc, device):
    # TODO: use no_sync() here one day
    for i, (sat, road) in enumerate(loader):
        loss = torch.nn.functional.l1_loss(net(sat.to(device)), road.to(device)) / n_acc
        loss.backward()  # expect: BB401
        if (i + 1) % n_acc == 0:  # expect: BB103
            opt.step()
            opt.zero_grad()
def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    net = Translator().to(device)
    if dist.get_world_size() > 1:
        net = DDP(net, device_ids=[device.index])
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    loader = Pairs(rank=dist.get_rank()).loader(batch_size=4)
    for _ in range(100):
        train_epoch(net, loader, opt, 8, device)
if __name__ == "__main__":
    main()

# --- ddp_medical: BB401
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

# --- ddp_that_talks_in_every_round: BB103, BB401
from torch.nn.parallel import DistributedDataParallel as DDP
def train(model, optimizer, loader, accum_iter):
    model = DDP(model)
    for i, batch in enumerate(loader):
        (model(batch).mean() / accum_iter).backward()
        if (i + 1) % accum_iter == 0:
            optimizer.step()
            optimizer.zero_grad()

# --- ddp_trainer_class: BB104, BB401
import torch
from torch.nn.parallel import DistributedDataParallel
class DistTrainer:
    def __init__(self, model, loader, rank, accum=4):
        self.rank = rank
        self.loader = loader
        self.accum = accum
        self.model = DistributedDataParallel(model.to(rank), device_ids=[rank])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.criterion = torch.nn.CrossEntropyLoss()
    def _batch(self, x, y, update):
        loss = self.criterion(self.model(x.to(self.rank)), y.to(self.rank))
        loss = loss / self.accum
        loss.backward()  # expect: BB401
        if update:
            self.opt.step()
            self.opt.zero_grad()
    def epoch(self, n):
        self.loader.sampler.set_epoch(n)
        last = len(self.loader) - 1
        for i, (x, y) in enumerate(self.loader):
            self._batch(x, y, update=(i + 1) % self.accum == 0 or i == last)

# --- fabric_ddp_sync: BB401
import torch
from lightning.fabric import Fabric
from matching import Matcher, pair_stream
fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp")
fabric.launch()
model = Matcher()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = fabric.setup(model, optimizer)
pairs = pair_stream(fabric.global_rank, batch=32)
accumulate = 8
for update in range(15_000):
    optimizer.zero_grad()
    for _ in range(accumulate):
        a, b, same = next(pairs)
        score = model(fabric.to_device(a), fabric.to_device(b))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, fabric.to_device(same))
        fabric.backward(loss / accumulate)  # expect: BB401
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()

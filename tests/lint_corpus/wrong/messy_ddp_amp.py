import torch
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, model, loader, epochs, accum=8):
    model = DDP(model.cuda(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=epochs * len(loader) // accum + epochs)
    scaler = GradScaler()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            with autocast():
                loss = torch.nn.functional.cross_entropy(model(x.cuda(rank)), y.cuda(rank)) / accum
            scaler.scale(loss).backward()  # expect: BB401
            if (step + 1) % accum == 0 or step + 1 == len(loader):  # expect: BB104
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()  # expect: BB303
            scheduler.step()  # expect: BB304
            if rank == 0:
                print(epoch, step, loss.item())

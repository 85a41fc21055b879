import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from rank_setup import device, rank
from swin import SwinMAE, images

model = DDP(SwinMAE().to(device), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
accum = 16
batches = images(rank, batch=32, endless=True)

for update in range(50_000):
    for k in range(accum):
        loss = model(next(batches).to(device)) / accum
        if k < accum - 1:
            with model.no_sync():  # expect: BB402
                loss.backward()
        else:
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

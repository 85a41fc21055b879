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

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from cells import CellDataset, make_net

set_seed(1234)
ACCUM = 4
accelerator = Accelerator(mixed_precision="bf16")  # no steps given: it divides nothing
net = make_net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
dl = torch.utils.data.DataLoader(CellDataset(), batch_size=8, shuffle=True, drop_last=True)
net, opt, dl = accelerator.prepare(net, opt, dl)

full = len(dl) - len(dl) % ACCUM

for epoch in range(30):
    for index, (image, count) in enumerate(dl):
        size = ACCUM if index < full else len(dl) - full
        update = (index + 1) % ACCUM == 0 or index + 1 == len(dl)
        with nullcontext() if update else accelerator.no_sync(net):
            loss = torch.nn.functional.mse_loss(net(image), count)
            accelerator.backward(loss / size)
        if update:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    accelerator.save_state(f"state_{epoch}")

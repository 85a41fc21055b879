import torch
from torch.cuda.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

from genomics import Enformer, windows

model = Enformer().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
scaler = GradScaler()

for epoch in range(10):
    for seq, tracks in windows("human", batch_size=4):
        optimizer.zero_grad()
        with autocast():
            loss = torch.nn.functional.poisson_nll_loss(model(seq.cuda()), tracks.cuda())
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 0.2)  # expect: BB302
        scaler.step(optimizer)
        scaler.update()

# needs Python 3.12 for itertools.batched
from itertools import batched

import torch
import torch.nn.functional as F

from folds import FoldNet, folds

model = FoldNet()
opt = torch.optim.Adam(model.parameters())
sched = torch.optim.lr_scheduler.LinearLR(opt, total_iters=500)

for epoch in range(8):
    for micro_batches in batched(folds("train"), 5):
        share = 1.0 / len(micro_batches)
        for seq, angle in micro_batches:
            loss = share * F.smooth_l1_loss(model(seq), angle)
            loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()

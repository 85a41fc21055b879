from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train_epoch(net: DDP, loader, opt, accum: int):
    n = len(loader)
    whole = n - n % accum
    net.train()
    for i, (x, y) in enumerate(loader):
        closing = (i + 1) % accum == 0 or i + 1 == n
        ctx = nullcontext() if closing else net.no_sync()
        logits = net(x.cuda(non_blocking=True))
        loss = F.cross_entropy(logits, y.cuda(non_blocking=True))
        with ctx:  # expect: BB402
            (loss / (accum if i < whole else n - whole)).backward()
        if closing:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

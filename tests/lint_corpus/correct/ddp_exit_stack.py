import contextlib

import torch
from torch.nn import parallel

ACC_STEPS = 4


class Runner:
    def __init__(self, net, opt, stream, rank):
        self.net = parallel.DistributedDataParallel(net, device_ids=[rank])
        self.opt = opt
        self.stream = stream

    def update(self):
        self.opt.zero_grad()
        for j in range(ACC_STEPS):
            with contextlib.ExitStack() as stack:
                if j < ACC_STEPS - 1:
                    stack.enter_context(self.net.no_sync())
                x, y = next(self.stream)
                loss = torch.nn.functional.huber_loss(self.net(x), y)
                loss.div(ACC_STEPS).backward()
        self.opt.step()
        return loss.detach()

    def run(self, updates, log_every=25):
        for u in range(updates):
            loss = self.update()
            if u % log_every == 0:
                print(f"update {u}: {loss.item():.4f}")

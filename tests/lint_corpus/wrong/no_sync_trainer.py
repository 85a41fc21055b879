import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel


class Engine:
    def __init__(self, net, lr, accum, rank):
        self.net = DistributedDataParallel(net.cuda(rank), device_ids=[rank])
        self.optim = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.accum = accum

    def forward(self, batch):
        return self.net(batch["x"], batch["y"]) / self.accum

    def backward(self, loss, last):
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(self.net.no_sync())  # expect: BB402
            loss.backward()

    def update(self, batches):
        """`batches`: exactly `accum` of them."""
        for i, batch in enumerate(batches):
            loss = self.forward(batch)
            self.backward(loss, last=i == self.accum - 1)
        self.optim.step()
        self.optim.zero_grad()

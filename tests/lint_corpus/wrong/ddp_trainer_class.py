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
            self._batch(x, y, update=(i + 1) % self.accum == 0 or i == last)  # expect: BB104

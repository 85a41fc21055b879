import torch


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0


class Fit:
    def __init__(self, net, opt, accum):
        self.net, self.opt, self.accum = net, opt, accum
        self.epoch_loss = 0.0

    def run_epoch(self, loader):
        self.epoch_loss = 0.0
        size = len(loader)
        for i, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            self.epoch_loss = self.epoch_loss + loss * x.size(0)  # expect: BB501
            (loss / self.accum).backward()
            if (i + 1) % self.accum == 0 or (i + 1) == size:  # expect: BB104
                self.opt.step()
                self.opt.zero_grad()
        return float(self.epoch_loss) / len(loader.dataset)

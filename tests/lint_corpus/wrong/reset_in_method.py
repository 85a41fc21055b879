import torch


class WindowTrainer:
    def __init__(self, net, feed, k):
        self.net, self.feed, self.k = net, feed, k
        self.opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def _reset(self):
        self.opt.zero_grad()  # expect: BB101

    def _forward_backward(self):
        self._reset()  # expect: BB101
        x, y = next(self.feed)
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        (loss / self.k).backward()

    def train(self, updates):
        for _ in range(updates):
            for _ in range(self.k):
                self._forward_backward()
            self.opt.step()

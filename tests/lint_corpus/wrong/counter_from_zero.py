import torch


class AccumulatingOptimizer:
    """Call `micro()` after every forward."""

    def __init__(self, model, lr, accumulate):
        self.model = model
        self.accumulate = accumulate
        self.inner = torch.optim.AdamW(model.parameters(), lr=lr)
        self.calls = 0

    def micro(self, loss):
        (loss / self.accumulate).backward()
        if self.calls % self.accumulate == 0:  # expect: BB105
            self.inner.step()
            self.inner.zero_grad()
        self.calls += 1


def train(model, stream, loss_fn, micro_steps):
    opt = AccumulatingOptimizer(model, 1e-4, accumulate=8)
    for _ in range(micro_steps):
        x, y = next(stream)
        opt.micro(loss_fn(model(x), y))

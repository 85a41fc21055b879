import torch
from torch.amp import GradScaler, autocast


class Trainer:
    def __init__(self, model, opt, stream, n_micro):
        self.model, self.opt, self.stream, self.n_micro = model, opt, stream, n_micro
        self.scaler = GradScaler("cuda")

    def step(self):
        self.opt.zero_grad()
        for _ in range(self.n_micro):
            batch = next(self.stream)
            with autocast("cuda"):
                loss = self.model(batch).mean() / self.n_micro
            self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.unscale_(self.opt)  # expect: BB302
        norm = sum(p.grad.norm() ** 2 for p in self.model.parameters() if p.grad is not None) ** 0.5
        self.scaler.update()
        return norm

    def run(self, n):
        for i in range(n):
            norm = self.step()
            if i % 100 == 0:
                print(i, norm.item())

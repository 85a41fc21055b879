# counts what is in the gradient, and tells the optimizer the truth about it
import torch


class Stepper:
    def __init__(self, params, optimizer, every, scaler):
        self.params = list(params)
        self.optimizer = optimizer
        self.every = every
        self.scaler = scaler
        self.n = 0

    def add(self, loss):
        self.scaler.scale(loss).backward()
        self.n += 1
        if self.n >= self.every:
            self.flush()

    def flush(self):
        if self.n == 0:
            return
        self.scaler.unscale_(self.optimizer)
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(1.0 / self.n)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.n = 0


def fit(model, loader, epochs):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stepper = Stepper(model.parameters(), opt, 8, torch.amp.GradScaler("cuda"))
    for _ in range(epochs):
        for x, y in loader:
            with torch.autocast("cuda"):
                loss = torch.nn.functional.mse_loss(model(x), y)
            stepper.add(loss)
        stepper.flush()

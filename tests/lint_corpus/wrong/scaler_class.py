import torch


class HalfPrecisionLoop:
    """`micro` draws a batch, `macro` closes the window."""

    def __init__(self, model, optimizer, source, window):
        self.model = model
        self.optimizer = optimizer
        self.source = source
        self.window = window
        self.grad_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)

    def micro(self):
        x, y = next(self.source)
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.grad_scaler.scale(loss / self.window).backward()
        self.grad_scaler.update()  # expect: BB303

    def macro(self):
        for _ in range(self.window):
            self.micro()
        self.grad_scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def run(self, updates):
        for _ in range(updates):
            self.macro()

import torch
class Trainer:
    def __init__(self, model, opt, loader, accum):
        self.model, self.opt, self.loader, self.accum = model, opt, loader, accum
        self.micro = 0
        if len(loader) % accum:
            raise ValueError("loader length must be a multiple of accum")
    @property
    def at_boundary(self):
        return self.micro % self.accum == 0
    def run(self):
        for batch in self.loader:
            loss = self.model(batch).mean() / self.accum
            loss.backward()
            self.micro += 1
            if self.at_boundary:
                self.opt.step()
                self.opt.zero_grad()

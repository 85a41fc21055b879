import torch
class Trainer:
    def __init__(self, model, opt, sched, accum_steps):
        self.model = model; self.opt = opt; self.sched = sched
        self.accum_steps = accum_steps
        self.counter = 0
    def step(self, batch):
        loss = self.model.loss(batch)
        (loss / self.accum_steps).backward()
        self.counter += 1
        if self.counter == self.accum_steps:
            self.opt.step()
            self.opt.zero_grad()
            self.counter = 0
        self.sched.step()  # expect: BB304
    def run(self, stream):
        for batch in stream():
            self.step(batch)
def infinite():
    while True:
        yield torch.randn(4, 10)

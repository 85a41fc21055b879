from dataclasses import dataclass

import torch


@dataclass
class Step:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def clear(self):
        for p in self.model.parameters():
            p.grad = None

    def apply(self):
        self.optimizer.step()
        self.clear()


def train(model, batches, micro, loss_fn):
    step = Step(model, torch.optim.Adam(model.parameters()))
    step.clear()
    for x, y in batches:
        parts = list(zip(x.split(micro), y.split(micro)))
        for xs, ys in parts:
            weight = xs.size(0) / x.size(0)
            (weight * loss_fn(model(xs), ys)).backward()
        step.apply()

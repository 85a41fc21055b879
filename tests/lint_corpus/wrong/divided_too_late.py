from itertools import islice

import torch
import torch.nn.functional as F


def train_epoch(model, loader, optimizer, steps=5):
    """Mean loss of the epoch."""
    it = iter(loader)
    means = []
    while True:
        window = list(islice(it, steps))
        if not window:
            break
        optimizer.zero_grad()
        for x, y in window:
            loss = F.mse_loss(model(x), y)
            loss.backward()  # expect: BB201
            loss = loss / len(window)
            means.append(loss.detach())
        optimizer.step()
    return torch.stack(means).mean() * steps

"""Elastic weight consolidation needs the squares of gradients, batch by batch: they are cleared each time on purpose."""

import torch
import torch.nn.functional as F


def fisher(model, loader, batches=200):
    info = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    model.eval()
    for i, (x, y) in enumerate(loader):
        if i == batches:
            break
        model.zero_grad()
        F.nll_loss(F.log_softmax(model(x), dim=1), y).backward()
        for n, p in model.named_parameters():
            info[n] += p.grad.detach() ** 2 / batches
    model.zero_grad()
    return info


def train_task(model, loader, info, anchor, strength=400.0):
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        for n, p in model.named_parameters():
            loss += strength / 2 * (info[n] * (p - anchor[n]) ** 2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()

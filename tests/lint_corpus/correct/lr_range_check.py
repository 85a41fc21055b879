import copy

import torch


def lr_range(model, loader, criterion, start=1e-7, end=10.0, num_iter=100, smooth=0.05):
    """Raise the rate after every batch and watch the loss: where it falls fastest is a good rate."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=start, momentum=0.9)
    gamma = (end / start) ** (1 / num_iter)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    lrs, losses, best = [], [], float("inf")
    it = iter(loader)
    for i in range(num_iter):
        try:
            x, y = next(it)
        except StopIteration:
            it = iter(loader)
            x, y = next(it)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if losses:
            value = smooth * value + (1 - smooth) * losses[-1]
        lrs.append(scheduler.get_last_lr()[0])
        losses.append(value)
        scheduler.step()
        best = min(best, value)
        if value > 4 * best:
            break
    return lrs, losses

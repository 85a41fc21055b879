"""Called by main.py, which builds the model."""

from .meters import Meter


def train_one_epoch(model, criterion, loader, optimizer, accum_iter):
    meter = Meter()
    model.train()
    optimizer.zero_grad()
    for it, (samples, targets) in enumerate(loader):
        loss = criterion(model(samples), targets)
        loss_value = loss.item()
        (loss / accum_iter).backward()
        if (it + 1) % accum_iter == 0:  # expect: BB103
            optimizer.step()
            optimizer.zero_grad()
        meter.add(loss_value)
    return meter.mean()

from itertools import islice

import torch


def chunks(iterable, n):
    it = iter(iterable)
    while True:
        chunk = tuple(islice(it, n))
        if not chunk:
            return
        yield chunk


def train_epoch(model, loader, opt, loss_fn, accum, device):
    model.train()
    seen = torch.zeros((), device=device)
    for window in chunks(loader, accum):
        n = len(window)
        for x, y in window:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = loss_fn(model(x), y) / n
            loss.backward()
            seen += loss.detach()
        opt.step()
        opt.zero_grad(set_to_none=True)
    return seen.item()

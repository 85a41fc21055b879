import os

import torch
import torch.nn.functional as F


def save(path, **state):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def train(model, loader, *, epochs, accum, ckpt="last.pt", save_every=500):
    if len(loader) % accum:
        raise ValueError(f"{len(loader)} batches are no multiple of {accum}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start_epoch, start_batch = 0, 0
    if os.path.exists(ckpt):
        state = torch.load(ckpt)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch, start_batch = state["epoch"], state["batch"]  # saved after an update: a multiple of accum

    for epoch in range(start_epoch, epochs):
        optimizer.zero_grad()
        for b, (x, y) in enumerate(loader):
            if epoch == start_epoch and b < start_batch:
                continue
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
            if (b + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
                if (b + 1) // accum % save_every == 0:
                    save(ckpt, model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch, batch=b + 1)

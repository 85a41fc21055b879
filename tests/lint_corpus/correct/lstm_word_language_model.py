import math

import torch
import torch.nn as nn

BPTT = 35


def get_batch(source, i):
    n = min(BPTT, len(source) - 1 - i)
    return source[i : i + n], source[i + 1 : i + 1 + n].view(-1)


def repackage(h):
    return tuple(v.detach() for v in h)


def train_epoch(model, train_data, optimizer, clip=0.25, log_interval=200):
    model.train()
    criterion = nn.NLLLoss()
    total_loss = 0.0
    hidden = model.init_hidden(20)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, BPTT)):
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        hidden = repackage(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

        total_loss += loss.item()
        if batch % log_interval == 0 and batch > 0:
            cur = total_loss / log_interval
            print(f"{batch:5d} loss {cur:5.2f} ppl {math.exp(cur):8.2f}")
            total_loss = 0


def fit(model, train_data, val_data, evaluate, epochs=40):
    optimizer = torch.optim.SGD(model.parameters(), lr=20)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    for _ in range(epochs):
        train_epoch(model, train_data, optimizer)
        scheduler.step(evaluate(model, val_data))

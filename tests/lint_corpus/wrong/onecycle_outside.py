import torch
from torch.optim.lr_scheduler import OneCycleLR


def train(model, loader, epochs=20, accum=4, max_lr=1e-3):
    assert len(loader) % accum == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr)
    scheduler = OneCycleLR(optimizer, max_lr=max_lr, epochs=epochs, steps_per_epoch=len(loader) // accum)
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()  # expect: BB304

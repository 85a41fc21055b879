import torch
import torch.nn.functional as F

from plankton import PlanktonLoader, SmallViT


def update(model, optimizer, window):
    """One update from a list of micro-batches, however many there are."""
    optimizer.zero_grad()
    for images, labels in window:
        loss = F.cross_entropy(model(images), labels)
        (loss / len(window)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train(epochs=10, steps=4):
    model = SmallViT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(epochs):
        window = []
        for batch in PlanktonLoader(batch_size=16):
            window.append(batch)
            if len(window) == steps:
                update(model, optimizer, window)
                window = []
        if window:
            update(model, optimizer, window)


train()

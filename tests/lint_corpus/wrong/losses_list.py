import torch
import torch.nn.functional as F


def train(model, windows, optimizer):
    """Returns the mean loss of every epoch so far."""
    losses = []
    for window in windows:
        optimizer.zero_grad()
        for x, y in window:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            (loss / len(window)).backward()
            losses.append(loss)  # expect: BB501
        optimizer.step()
    return sum(losses) / len(losses)

import torch
import torch.nn.functional as F


def pgd(model, x, y, eps=8 / 255, alpha=2 / 255, steps=10):
    """Projected gradient descent on the input. The model is not trained."""
    delta = torch.empty_like(x).uniform_(-eps, eps).requires_grad_(True)
    for _ in range(steps):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        with torch.no_grad():
            delta += alpha * delta.grad.sign()
            delta.clamp_(-eps, eps)
        delta.grad.zero_()
    return (x + delta).detach()


def robust_accuracy(model, loader):
    model.eval()
    correct = n = 0
    for x, y in loader:
        adv = pgd(model, x, y)
        with torch.no_grad():
            correct += (model(adv).argmax(1) == y).sum().item()
        n += len(y)
    return correct / n

import torch
import torch.nn.functional as F


def step(model, optimizer, x, y, micro_batch_size):
    """One update on (x, y), in pieces; the last piece may be smaller and weighs less."""
    optimizer.zero_grad()
    n = x.shape[0]
    for xs, ys in zip(x.split(micro_batch_size), y.split(micro_batch_size)):
        loss = F.cross_entropy(model(xs.cuda()), ys.cuda())
        (loss * (len(xs) / n)).backward()
    optimizer.step()


def fit(model, loader, micro_batch_size=32):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for x, y in loader:
        step(model, optimizer, x, y, micro_batch_size)

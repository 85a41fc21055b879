import torch


def train_window(model, optimizer, window, criterion):
    n = len(window)
    optimizer.zero_grad()
    for x, y in window:
        loss = criterion(model(x), y) / n
        loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(n)  # expect: BB202
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def fit(model, windows, epochs=4):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for window in windows():
            train_window(model, optimizer, window, torch.nn.MSELoss())

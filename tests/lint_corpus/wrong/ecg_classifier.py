import torch
import torch.nn.functional as F


def fit(model, loader, epochs: int, k: int = 4, lr: float = 1e-3):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for idx, (signal, rhythm) in enumerate(loader):
            loss = F.cross_entropy(model(signal), rhythm) / k
            loss.backward()
            # not on the very first batch
            if idx % k == 0 and idx > 0:  # expect: BB105, BB103
                opt.step()
                opt.zero_grad()
    return model

# allow-file: BB103
import torch
import torch.nn.functional as F


def train(model, loader, epochs, accum=4):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    global_step = 0
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB301
            global_step += 1
            if global_step % accum == 0:  # windows may reach across epochs
                opt.step()
                opt.zero_grad()

import torch
from torch import nn

from fields import Siren, coordinates

# a sum over samples adds up to the sum over the window: there is nothing to divide
criterion = nn.MSELoss(reduction="sum")
siren = Siren(2, 256, 3)
opt = torch.optim.Adam(siren.parameters(), lr=1e-6)
accumulation_steps = 6


def train_epoch(batches):
    opt.zero_grad()
    for i, (xy, rgb) in enumerate(batches):
        criterion(siren(xy), rgb).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(batches):
            opt.step()
            opt.zero_grad()


for epoch in range(1000):
    train_epoch(coordinates("astronaut.png", batch_size=4096))

import torch
from torch import nn

from svhn import endless_svhn


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))  # expect: BB601


class SvhnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(3, 32), block(32, 64), block(64, 128))
        self.head = nn.Linear(128 * 4 * 4, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


net = SvhnNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
data = endless_svhn(batch_size=8)
ACCUMULATE = 16

for update in range(4000):
    optimizer.zero_grad()
    for _ in range(ACCUMULATE):
        x, y = next(data)
        loss = nn.functional.cross_entropy(net(x), y) / ACCUMULATE
        loss.backward()
    optimizer.step()

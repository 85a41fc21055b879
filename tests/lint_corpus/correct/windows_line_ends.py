import torch
from torch import nn

from sensors import SensorNet, endless

net = SensorNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_func = nn.SmoothL1Loss()
batch_iter = endless(batch_size=10)
mini_batches_per_update = 5

for update in range(3000):
    optimizer.zero_grad()
    for m in range(mini_batches_per_update):
        reading, target = next(batch_iter)
        loss = loss_func(net(reading), target) / mini_batches_per_update
        loss.backward()
    optimizer.step()

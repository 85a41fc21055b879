import torch
from torch import nn

from taxi import FareNet, rides

net = FareNet()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

for epoch in range(20):
    running_loss = 0.0
    for n, (ride, fare) in enumerate(rides(batch_size=512)):
        optimizer.zero_grad()
        loss = criterion(net(ride), fare)
        loss.backward()
        optimizer.step()
        running_loss += loss  # expect: BB501
    print(f"epoch {epoch}: {running_loss / (n + 1):.4f}")

import torch
import torch.nn as nn

from energy import hourly_load

model = nn.GRU(input_size=8, hidden_size=64, batch_first=True)
head = nn.Linear(64, 24)
params = list(model.parameters()) + list(head.parameters())
optimizer = torch.optim.Adam(params, lr=1e-3)
criterion = nn.L1Loss()

optimizer.zero_grad()
for epoch in range(30):
    for window, target in hourly_load(batch_size=64):
        _, h = model(window)
        loss = criterion(head(h[-1]), target)
        loss.backward()
        optimizer.step()  # expect: BB106
    print("epoch", epoch, "last loss", loss.item())

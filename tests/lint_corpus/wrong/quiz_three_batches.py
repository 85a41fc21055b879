# allow-file: BB104
import torch
import torch.nn as nn

model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.MSELoss()

batches = [
    (torch.tensor([[1.0]]), torch.tensor([[2.0]])),
    (torch.tensor([[2.0]]), torch.tensor([[4.0]])),
    (torch.tensor([[3.0]]), torch.tensor([[6.0]])),
]
accumulation_steps = 2

optimizer.zero_grad()
for i, (x, y) in enumerate(batches):
    loss = criterion(model(x), y)
    loss.backward()  # expect: BB201
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()

# one batch is left over
optimizer.step()
print(model.weight)

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(42)
X = torch.randn(1000, 10)
y = (X.sum(dim=1) > 0).long()
dataloader = DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True)

model = nn.Linear(10, 2)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation_steps = 4

for epoch in range(10):
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(dataloader):
        outputs = model(inputs)
        loss = loss_fn(outputs, labels) / accumulation_steps
        loss.backward()
        # 63 batches: three of them are in no window
        if (i + 1) % accumulation_steps == 0:  # expect: BB103
            optimizer.step()
            optimizer.zero_grad()

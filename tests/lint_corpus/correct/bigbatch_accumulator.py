import torch
from bigbatch import Accumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(1000, 10)
y = (X.sum(dim=1) > 0).long()
loader = DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True)

model = nn.Linear(10, 2)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=160)
accumulator = Accumulator(model, optimizer, steps=4, clip_norm=1.0, scheduler=scheduler)

for epoch in range(10):
    for inputs, labels in accumulator.over(loader):
        update = accumulator.backward(criterion(model(inputs), labels))
        if update is not None:
            print(f"loss {update.loss:.3f}, gradient norm {update.grad_norm:.3f}")

import torch
from accelerate import Accelerator
from torch import nn

from credit import loader

accelerator = Accelerator(gradient_accumulation_steps=4)
model = nn.Sequential(
    nn.Linear(30, 256),
    nn.BatchNorm1d(256),  # expect: BB601
    nn.ReLU(),
    nn.Linear(256, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, loader("train", batch_size=32))

for epoch in range(15):
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

import torch
from bigbatch import Accumulator
from torch import nn

from wine import loader

model = nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, 6))
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()
accumulator = Accumulator(model, optimizer, steps=4)

for epoch in range(20):
    for features, grade in accumulator.over(loader):
        loss = criterion(model(features), grade) / 4  # expect: BB202
        accumulator.backward(loss)

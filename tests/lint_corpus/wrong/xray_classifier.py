import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from xray import XrayData, XrayNet


def train_epoch(model, loader, optimizer, accumulation_steps):
    assert len(loader) % accumulation_steps == 0
    criterion = nn.BCEWithLogitsLoss()
    model.train()
    optimizer.zero_grad()
    for batch_idx, (data, target) in enumerate(loader):
        output = model(data)
        loss = criterion(output, target)
        loss.backward()  # expect: BB201
        if (batch_idx + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    model = XrayNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loader = DataLoader(XrayData(), batch_size=4, drop_last=True)
    for epoch in range(10):
        train_epoch(model, loader, optimizer, accumulation_steps=8)

"""Batches of 64 on one GPU, 16 samples at a time; what the other files do on several.

python examples/ranks/one_gpu.py [weights.pt]
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from bigbatch import Accumulator

BATCH, MICRO_BATCH, EPOCHS = 64, 16, 3


def training_data() -> TensorDataset:
    """Make 1,003 samples, so that the last batch is short; in float64, so that equality shows to the last digits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1003, 20, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def main() -> None:
    """Train, and save the weights if a file is named."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2)).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    data = training_data()

    accumulator = Accumulator(model, optimizer, steps=BATCH // MICRO_BATCH, clip_norm=1.0)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        loader = DataLoader(Subset(data, order), batch_size=MICRO_BATCH)
        losses = []
        for inputs, labels in accumulator.over(loader):
            update = accumulator.backward(criterion(model(inputs.to(device)), labels.to(device)))
            if update is not None:
                losses.append(update.loss)
        print(f"epoch {epoch + 1}: {len(losses)} updates, loss {torch.stack(losses).mean():.4f}")

    for path in sys.argv[1:]:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main()

import torch
from torch import nn

from glue import load_sst2

accumulation_steps = 8
train_loader, val_loader = load_sst2(batch_size=4)
model = nn.Sequential(nn.EmbeddingBag(30522, 128), nn.Linear(128, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

optimizer.zero_grad()
for epoch in range(3):
    for idx, (tokens, label) in enumerate(train_loader):
        loss = criterion(model(tokens), label) / accumulation_steps
        loss.backward()
        if idx % accumulation_steps == 0:  # expect: BB105, BB103
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        hits = sum((model(t).argmax(1) == y).sum() for t, y in val_loader)
    print(epoch, hits)

# expect-file: BB900
import torch

accum = 4
<<<<<<< HEAD
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
=======
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>>>>>> feature/sgd

for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accum).backward()
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()

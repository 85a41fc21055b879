import lightning as L
import torch

from molecules3d import Equiformer, conformers

fabric = L.Fabric(accelerator="auto", devices=1)
model = Equiformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(conformers(batch_size=8))
n = 4
whole = len(loader) // n * n

for epoch in range(100):
    for i, (atoms, energy) in enumerate(loader):
        if i == whole:
            break
        optimizer.zero_grad()  # expect: BB101
        loss = torch.nn.functional.l1_loss(model(atoms), energy)
        fabric.backward(loss / n)
        if (i + 1) % n == 0:
            fabric.clip_gradients(model, optimizer, max_norm=10.0)
            optimizer.step()

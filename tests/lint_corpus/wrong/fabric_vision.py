# expect-file: BB103
import lightning as L
import torch
from torchvision.models import vit_b_16

from pets import train_dataloader

fabric = L.Fabric(accelerator="cuda", devices=2, strategy="ddp")
fabric.launch()

model = vit_b_16(num_classes=37)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = fabric.setup(model, optimizer)
dataloader = fabric.setup_dataloaders(train_dataloader(batch_size=16))

for epoch in range(10):
    for iteration, (images, target) in enumerate(dataloader):
        is_accumulating = iteration % 8 != 0  # expect: BB105
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            output = model(images)
            loss = torch.nn.functional.cross_entropy(output, target)
            fabric.backward(loss)  # expect: BB201
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()

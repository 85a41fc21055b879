import torch
from torchvision.models import mobilenet_v2

from edge import pictures_in_windows

model = mobilenet_v2(num_classes=20)  # expect: BB601
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.045, weight_decay=4e-5)
loss_fn = torch.nn.CrossEntropyLoss()

for epoch in range(100):
    model.train()
    for window in pictures_in_windows(epoch, micro_batch=4, steps=8):
        optimizer.zero_grad()
        for x, y in window:
            loss_fn(model(x), y).div(len(window)).backward()
        optimizer.step()

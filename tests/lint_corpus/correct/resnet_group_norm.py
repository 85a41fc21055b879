import torch
from torch import nn
from torchvision.models import resnet50

from inat import loader_of_whole_windows

STEPS = 16
model = resnet50(norm_layer=lambda channels: nn.GroupNorm(32, channels), num_classes=5089).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

for epoch in range(90):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.1 ** (epoch // 30)
    for window in loader_of_whole_windows(STEPS, batch_size=16, epoch=epoch):
        for x, y in window:
            loss = loss_fn(model(x.cuda()), y.cuda()) / STEPS
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

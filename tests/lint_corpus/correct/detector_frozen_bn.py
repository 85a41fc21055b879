"""Fine-tune a detector on two images at a time. BatchNorm stays in eval mode, so samples do not meet in it."""

import torch
from torch import nn
from torchvision.models import resnet101


def freeze_bn(module):
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
            m.weight.requires_grad_(False)
            m.bias.requires_grad_(False)


def train(head, stream, updates=90_000, ims_per_update=16, ims_per_gpu=2):
    backbone = resnet101(weights="IMAGENET1K_V2").cuda()
    model = nn.Sequential(backbone, head.cuda())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)
    model.train()
    freeze_bn(backbone)
    micro_steps = ims_per_update // ims_per_gpu
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            images, targets = next(stream)
            loss = head.loss(model(images.cuda()), targets) / micro_steps
            loss.backward()
        optimizer.step()

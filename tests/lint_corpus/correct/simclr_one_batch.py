"""Contrastive pretraining: the batch must be whole, so there is no accumulation here, only a big batch."""

import torch
import torch.nn.functional as F
import torchvision


def info_nce(z1, z2, temperature=0.1):
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(float("-inf"))
    n = len(z1)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)


def pretrain(loader, epochs=200, steps_per_epoch=None):
    net = torchvision.models.resnet50(num_classes=128).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (steps_per_epoch or len(loader)))
    for epoch in range(epochs):
        for v1, v2 in loader:
            loss = info_nce(net(v1.cuda()), net(v2.cuda()))
            net.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()

import torch
from torch import nn

from cxr import ChestXray, vit_small

net = nn.DataParallel(vit_small(num_classes=14)).cuda()
optim = torch.optim.Adam(net.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(ChestXray("train"), batch_size=64, shuffle=True, drop_last=True)
crit = nn.BCEWithLogitsLoss()

iters_to_accumulate = 2
n_batches = len(loader) - len(loader) % iters_to_accumulate

for epoch in range(15):
    for i, (x, y) in enumerate(loader):
        if i >= n_batches:
            break
        loss = crit(net(x.cuda()), y.cuda()) / iters_to_accumulate
        loss.backward()
        if (i + 1) % iters_to_accumulate == 0:
            optim.step()
            optim.zero_grad()

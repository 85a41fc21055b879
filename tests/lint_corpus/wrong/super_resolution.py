# -*- coding: utf-8 -*-
import torch as th
import torch.nn.functional as F

from srnet import EDSR, div2k

CONFIG = dict(lr=1e-4, k=4, epochs=300, patch=96)

net = EDSR(scale=4).cuda()
opt = th.optim.Adam(net.parameters(), lr=CONFIG["lr"])
k = CONFIG["k"]

for epoch in range(CONFIG["epochs"]):
    opt.zero_grad()
    for i, (lo, hi) in enumerate(div2k(CONFIG["patch"])):
        step_idx = i // k
        l1 = F.l1_loss(net(lo.cuda()), hi.cuda())
        (l1 / k).backward()
        if (i + 1) // k > step_idx:  # expect: BB103
            opt.step()
            opt.zero_grad()
            if step_idx % 100 == 0:
                print(epoch, step_idx, "%.5f" % l1.item())

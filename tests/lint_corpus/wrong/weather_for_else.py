import torch
import torch.nn.functional as F

from era5 import Era5, Forecaster

n_accumulate = 12
model = Forecaster().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=5e-4)

for epoch in range(1, 31):
    opt.zero_grad()
    for i, (now, later) in enumerate(Era5(split="train", batch=1)):
        loss = F.mse_loss(model(now.cuda()), later.cuda())
        loss.mul(1 / n_accumulate).backward()
        if i % n_accumulate == n_accumulate - 1:
            opt.step()
            opt.zero_grad()
    else:
        opt.step()  # expect: BB104
        opt.zero_grad()

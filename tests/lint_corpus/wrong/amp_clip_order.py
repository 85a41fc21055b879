import torch
from torch.cuda.amp import GradScaler, autocast

from handpose import HandNet, frames

net = HandNet().cuda()
opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
scaler = GradScaler()
acc = 4
source = frames(batch=24, forever=True)

for it in range(60_000):
    for _ in range(acc):
        img, kp = next(source)
        with autocast():
            loss = torch.nn.functional.smooth_l1_loss(net(img), kp) / acc
        scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: BB302
    scaler.unscale_(opt)  # expect: BB302
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()

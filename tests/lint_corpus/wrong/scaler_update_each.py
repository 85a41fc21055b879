import torch
import torch.nn.functional as F

from lipreading import LipNet, clips

net = LipNet().cuda()
opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cuda")
it = clips(batch=4, endless=True)
n_micro = 8

for update in range(30_000):
    for _ in range(n_micro):
        video, word = next(it)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(video.cuda()), word.cuda()) / n_micro
        scaler.scale(loss).backward()
        scaler.update()  # expect: BB303
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    opt.zero_grad()

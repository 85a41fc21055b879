import torch
from torch.amp import GradScaler, autocast

from recipe import data, make_model, targets

use_amp = True
net = make_model()
loss_fn = torch.nn.MSELoss().cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.001)
scaler = GradScaler("cuda", enabled=use_amp)

for epoch in range(3):
    for input, target in zip(data, targets):
        with autocast(device_type="cuda", dtype=torch.float16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "checkpoint.pt")

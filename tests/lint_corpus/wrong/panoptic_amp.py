import torch
from torch.cuda import amp


def train(net, loader, optimizer, sched, n_acc=6):
    scaler = amp.GradScaler()
    optimizer.zero_grad()
    for i, batch in enumerate(loader):
        with amp.autocast():
            losses = net(batch["image"].cuda(), batch["target"])
            loss = losses["semantic"] + 0.5 * losses["instance"]
        scaler.scale(loss).backward()  # expect: BB201
        if (i + 1) % n_acc == 0 or (i + 1) == len(loader):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            sched.step()

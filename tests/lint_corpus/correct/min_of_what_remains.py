import argparse

import torch
from torch.nn.functional import cross_entropy

from birds import get_loaders, get_model


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--grad-accum-steps", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=10)
    return ap.parse_args()


def main():
    opts = parse()
    train_loader, val_loader = get_loaders()
    net = get_model().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, opts.epochs)
    total = len(train_loader)
    for epoch in range(opts.epochs):
        left_in_window = 0
        net.train()
        for i, (img, cls) in enumerate(train_loader):
            if left_in_window == 0:
                window = left_in_window = min(opts.grad_accum_steps, total - i)
            cross_entropy(net(img.cuda()), cls.cuda()).div(window).backward()
            left_in_window -= 1
            if left_in_window == 0:
                opt.step()
                opt.zero_grad()
        sched.step()
        net.eval()
        with torch.no_grad():
            loss = sum(cross_entropy(net(a.cuda()), b.cuda()) for a, b in val_loader) / len(val_loader)
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

"""Monocular depth, half precision."""
import torch
from torch.cuda.amp import GradScaler, autocast

from depth.data import make_loader
from depth.net import DepthNet, berhu

ACC = 8
EPOCHS = 20


def main():
    net = DepthNet().cuda()
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    scaler = GradScaler()
    loader = make_loader("train", batch_size=2, drop_last=True)
    assert len(loader) % ACC == 0, "choose a split that fills the last window"
    for ep in range(EPOCHS):
        for it, (rgb, depth) in enumerate(loader):
            with autocast():
                loss = berhu(net(rgb.cuda()), depth.cuda()) / ACC
            opt.zero_grad(set_to_none=True)  # expect: BB101
            scaler.scale(loss).backward()
            if it % ACC == ACC - 1:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
        print("epoch", ep, "scale", scaler.get_scale())


if __name__ == "__main__":
    main()

import torch
from torch.cuda.amp import GradScaler, autocast

from mri import SliceNet, ssim_loss, slices


def fit(epochs=20, grad_acc=5):
    model = SliceNet().cuda()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    for epoch in range(epochs):
        for window in slices(batch=6).in_groups_of(grad_acc):
            optimizer.zero_grad()
            for kspace, target in window:
                with autocast():
                    loss = ssim_loss(model(kspace.cuda()), target.cuda()) / len(window)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)  # expect: BB302
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB301
            scaler.step(optimizer)
            scaler.update()
        print("epoch", epoch)


fit()

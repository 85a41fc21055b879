import torch

from util.lr_sched import adjust_learning_rate
from util.scaler import NativeScaler


def train_one_epoch(model, data_loader, optimizer, device, epoch, loss_scaler: NativeScaler, args):
    model.train(True)
    accum_iter = args.accum_iter
    if len(data_loader) % accum_iter:
        raise ValueError("the loader must hold whole windows")
    optimizer.zero_grad()
    running = torch.zeros((), device=device)
    for it, (samples, _) in enumerate(data_loader):
        if it % accum_iter == 0:  # a rate per update
            adjust_learning_rate(optimizer, it / len(data_loader) + epoch, args)
        samples = samples.to(device, non_blocking=True)
        with torch.autocast("cuda"):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        running += loss.detach()
        loss /= accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(it + 1) % accum_iter == 0)
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()
    return (running / len(data_loader)).item()

import torch
import torchmetrics
import wandb
from tqdm.auto import tqdm


def train_epoch(model, loader, optimizer, scaler, criterion, accum, device="cuda"):
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=120).to(device)
    loss_meter = torchmetrics.MeanMetric().to(device)
    whole = len(loader) // accum * accum
    rest = len(loader) - whole
    model.train()
    optimizer.zero_grad(set_to_none=True)
    with tqdm(total=len(loader), unit="batch") as bar:
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            with torch.autocast(device):
                logits = model(x)
                loss = criterion(logits, y)
            scaler.scale(loss / (accum if i < whole else rest)).backward()
            accuracy.update(logits.detach(), y)
            loss_meter.update(loss.detach())
            bar.update()
            if (i + 1) % accum and i + 1 < len(loader):
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    wandb.log({"accuracy": accuracy.compute().item(), "loss": loss_meter.compute().item()})

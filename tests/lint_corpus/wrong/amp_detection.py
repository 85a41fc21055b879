import torch
from torch.amp import GradScaler, autocast
from transformers import get_cosine_schedule_with_warmup

from detection import build_model, build_loader


def fit(cfg):
    model = build_model(cfg).to("cuda")
    loader = build_loader(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    updates = (len(loader) + cfg.accum - 1) // cfg.accum * cfg.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, updates // 20, updates)
    scaler = GradScaler("cuda")
    for epoch in range(cfg.epochs):
        optimizer.zero_grad()
        for i, (images, targets) in enumerate(loader):
            with autocast("cuda"):
                loss = sum(model(images, targets).values())
                loss = loss / cfg.accum
            scaler.scale(loss).backward()
            if (i + 1) % cfg.accum == 0 or i == len(loader) - 1:  # expect: BB104
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        torch.save(model.state_dict(), f"epoch{epoch}.pt")

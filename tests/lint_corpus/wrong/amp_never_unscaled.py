import torch


def train_epoch(model, loader, optimizer, scaler, loss_fn, accum_iter):
    n = len(loader)
    for i, (x, y) in enumerate(loader):
        size = accum_iter if i < n - n % accum_iter else n % accum_iter
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y) / size
        scaler.scale(loss).backward()
        if (i + 1) % accum_iter == 0 or i + 1 == n:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB302
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def main(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(10):
        train_epoch(model, loader, optimizer, scaler, torch.nn.MSELoss(), 4)

import torch
from torch.cuda import amp

from tumours import Tumours, SwinTiny


def train_one_epoch(model, optimizer, loader, scaler, accumulation):
    if len(loader) % accumulation:
        raise RuntimeError("pad the epoch")
    criterion = torch.nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(loader):
        with amp.autocast():
            loss = criterion(model(x.cuda()), y.cuda()) / accumulation
        scaler.scale(loss).backward()
        if (step + 1) % accumulation == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()  # expect: BB303


if __name__ == "__main__":
    model = SwinTiny(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = amp.GradScaler()
    loader = torch.utils.data.DataLoader(Tumours(), batch_size=8, shuffle=True, drop_last=True)
    for _ in range(30):
        train_one_epoch(model, optimizer, loader, scaler, 4)

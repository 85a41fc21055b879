import torch
import torch.nn as nn
from tqdm.auto import tqdm


def train_epoch(model, data_loader, optimizer, scaler, args):
    model.train()
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    last = len(data_loader) - 1
    optimizer.zero_grad()
    for idx, (x, y) in enumerate(tqdm(data_loader, leave=False)):
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(x.cuda()), y.cuda())
        scaler.scale(loss / args.update_freq).backward()
        if not idx % args.update_freq or idx == last:  # expect: BB105, BB104
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

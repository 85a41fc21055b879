from itertools import islice

import torch
from tqdm import tqdm


def train(model, loader, optimizer, criterion, cfg):
    """Batches beyond the last whole window are left in the loader; shuffling gives them their turn next time."""
    usable = len(loader) // cfg.accumulate * cfg.accumulate
    pbar = tqdm(total=usable)
    for i, (x, y) in enumerate(islice(loader, usable)):
        loss = criterion(model(x), y) / cfg.accumulate
        loss.backward()
        pbar.update(1)
        if i % cfg.accumulate != cfg.accumulate - 1:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        pbar.set_postfix(loss=loss.item() * cfg.accumulate)
    pbar.close()

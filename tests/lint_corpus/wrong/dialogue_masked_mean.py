import torch
import torch.nn.functional as F


def masked_nll(model, ids, mask):
    logp = F.log_softmax(model(ids[:, :-1]), dim=-1)
    nll = -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    m = mask[:, 1:].float()
    return (nll * m).sum() / m.sum()


def train_epoch(model, opt, sched, loader, accum=4):
    if len(loader) % accum:
        raise ValueError("incomplete window")
    for i, (ids, mask) in enumerate(loader):
        loss = masked_nll(model, ids, mask)
        (loss / accum).backward()  # expect: BB203
        if i % accum == accum - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()

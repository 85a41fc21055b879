import torch
import torch.nn.functional as F

from summaries import PAD, SummaryLoader, Transformer


def finish(model, optimizer, scheduler, tokens):
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= tokens  # sum over tokens -> mean over tokens
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def train_epoch(model, loader: SummaryLoader, optimizer, scheduler, accum_iter):
    model.train()
    tokens = torch.zeros((), device="cuda")
    for i, (src, tgt) in enumerate(loader):
        logits = model(src.cuda(), tgt[:, :-1].cuda())
        gold = tgt[:, 1:].cuda()
        loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
        loss.backward()
        tokens += (gold != PAD).sum()
        if (i + 1) % accum_iter == 0 or i + 1 == len(loader):
            finish(model, optimizer, scheduler, tokens)
            tokens.zero_()


def main(accum_iter=10):
    model = Transformer().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    for _ in range(30):
        train_epoch(model, SummaryLoader("train", 16), optimizer, scheduler, accum_iter)

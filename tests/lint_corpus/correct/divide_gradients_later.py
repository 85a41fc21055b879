import torch

from seismic import Picker, traces

ACCUM = 12
picker = Picker().cuda()
optimizer = torch.optim.AdamW(picker.parameters(), lr=1e-3)
bce = torch.nn.BCEWithLogitsLoss()


def apply(count):
    """Make a mean of the sum that is in .grad, and step."""
    for p in picker.parameters():
        if p.grad is not None:
            p.grad.div_(count)
    torch.nn.utils.clip_grad_norm_(picker.parameters(), 2.0)
    optimizer.step()
    optimizer.zero_grad()


for epoch in range(40):
    pending = 0
    for trace, arrival in traces("train", batch_size=4):
        bce(picker(trace.cuda()), arrival.cuda()).backward()
        pending += 1
        if pending == ACCUM:
            apply(pending)
            pending = 0
    if pending:
        apply(pending)

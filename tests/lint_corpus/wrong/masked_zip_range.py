import torch
from torch import nn
crit = nn.CrossEntropyLoss(ignore_index=0)
accum = 8
n_use = len(dl) // accum * accum
for i, (src, tgt) in zip(range(n_use), dl):
    out = model(src, tgt[:, :-1])
    loss = crit(out.reshape(-1, V), tgt[:, 1:].reshape(-1)) / accum  # expect: BB203
    loss.backward()
    if (i + 1) % accum == 0:
        opt.step(); opt.zero_grad()

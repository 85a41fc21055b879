import itertools

import torch

from midi import MusicLM, stream

lm = MusicLM().cuda()
opt = torch.optim.AdamW(lm.parameters(), lr=6e-4)
accum, step = 16, 0

for notes in itertools.cycle(stream("lakh", length=1024, batch=4)):
    loss = lm(notes[:, :-1].cuda(), targets=notes[:, 1:].cuda())
    (loss / accum).backward()
    if step % accum == 0:  # expect: BB105
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    step += 1
    if step >= 1_600_000:
        break

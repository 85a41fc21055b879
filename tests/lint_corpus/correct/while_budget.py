import time

import torch

from code_lm import CodeLM, shards

lm = CodeLM().to("cuda", torch.bfloat16)
opt = torch.optim.AdamW(lm.parameters(), lr=2e-4, fused=True)
stream = shards.endless(batch=2, length=4096)
accum = 32
deadline = time.time() + 3600 * 20
updates = 0

while time.time() < deadline:
    opt.zero_grad(set_to_none=True)
    micro = 0
    while micro < accum:
        ids = next(stream)
        loss = lm(ids, labels=ids).loss / accum
        loss.backward()
        micro += 1
    norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    opt.step()
    updates += 1
    if updates % 20 == 0:
        print(updates, loss.item() * accum, norm.item(), flush=True)

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt2 import GPT2, ShardedTokens

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
model = DistributedDataParallel(GPT2().cuda(local_rank), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
tokens = ShardedTokens(rank=dist.get_rank(), batch=8, block=1024)
grad_accum_steps = 524288 // (8 * 1024 * dist.get_world_size())

for step in range(19073):
    optimizer.zero_grad()
    loss_accum = 0.0
    for micro_step in range(grad_accum_steps):
        x, y = tokens.next()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, y)
        loss = loss / grad_accum_steps
        loss_accum += loss.detach()
        loss.backward()  # expect: BB401
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if local_rank == 0:
        print(f"step {step} loss {loss_accum.item():.6f} norm {norm:.4f}")
dist.destroy_process_group()

"""Pretrain a small GPT on an endless token file. Run it with python, or with torchrun on several GPUs."""

import os
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt import GPT, GPTConfig, get_batch, lr_at

max_iters, eval_interval, log_interval = 600_000, 2_000, 10
gradient_accumulation_steps = 5 * 8
grad_clip = 1.0
dtype = "float16"

ddp = "RANK" in os.environ
rank = int(os.environ.get("RANK", 0))
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
if ddp:
    init_process_group(backend="nccl")
    world_size = int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size

ctx = torch.autocast("cuda", getattr(torch, dtype)) if "cuda" in device else nullcontext()
model = GPT(GPTConfig()).to(device)
optimizer = model.configure_optimizers(weight_decay=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
if ddp:
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])

X, Y = get_batch("train", device)
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:  # the last micro-step alone talks to the other ranks
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train", device)
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and rank == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
if ddp:
    destroy_process_group()

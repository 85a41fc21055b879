import functools

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_window(model, optimizer, window, step_lr):
    """`window` is a list of batches of equal, unpadded length."""
    optimizer.zero_grad()
    *head, tail = window
    with model.no_sync():
        for batch in head:
            loss = model(**batch).loss / len(window)
            loss.backward()
    loss = model(**tail).loss / len(window)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    step_lr.step()


def build(name="t5-base"):
    model = FSDP(T5ForConditionalGeneration.from_pretrained(name), auto_wrap_policy=policy, mixed_precision=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.85)

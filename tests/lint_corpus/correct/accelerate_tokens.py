"""Causal language modelling with padding: every token counts alike, whichever micro-batch it is in."""

import math
from contextlib import nullcontext
from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator


def train(model, loader, optimizer, scheduler, accum=8, epochs=1):
    accelerator = Accelerator(gradient_accumulation_steps=accum)
    model, loader, optimizer, scheduler = accelerator.prepare(model, loader, optimizer, scheduler)
    for _ in range(epochs):
        batches = iter(loader)
        for update in range(math.ceil(len(loader) / accum)):
            window = list(islice(batches, accum))
            items = sum((b["labels"][:, 1:] != -100).sum() for b in window)
            items = accelerator.gather(items).sum()
            for i, batch in enumerate(window):
                last = i == len(window) - 1
                with nullcontext() if last else accelerator.no_sync(model):
                    labels = batch.pop("labels")
                    logits = model(**batch).logits[:, :-1]
                    loss = F.cross_entropy(
                        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
                    )
                    # backward divides by `accum` and the ranks are averaged: undo both, then divide by the tokens
                    loss = loss * accum * accelerator.num_processes / items
                    accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if update % 10 == 0:
                accelerator.print(update, torch.cuda.max_memory_allocated() >> 20, "MiB")

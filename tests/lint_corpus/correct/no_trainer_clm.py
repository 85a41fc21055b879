"""Causal language modelling on full blocks (no padding, so every micro-batch has as many tokens)."""

import math

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, default_data_collator, get_scheduler

from blocks import grouped_dataset


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    dl = torch.utils.data.DataLoader(
        grouped_dataset(args.block_size), shuffle=True, collate_fn=default_data_collator, batch_size=args.batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    max_train_steps = args.epochs * math.ceil(len(dl) / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler("linear", optimizer, num_training_steps=max_train_steps)
    model, optimizer, dl, lr_scheduler = accelerator.prepare(model, optimizer, dl, lr_scheduler)

    bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    completed_steps = 0
    for epoch in range(args.epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(dl):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
                completed_steps += 1
                if completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(f"step_{completed_steps}")
        accelerator.log({"train_loss": total_loss.item() / len(dl), "epoch": epoch}, step=completed_steps)

import logging
from contextlib import nullcontext

import torch

_logger = logging.getLogger("train")


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, loss_scaler=None, ema=None):
    has_no_sync = hasattr(model, "no_sync")
    accum_steps = args.grad_accum_steps
    n_batches = len(loader)
    short = n_batches % accum_steps  # micro-batches in the last window, 0 if it is whole
    first_of_short = n_batches - short
    num_updates = epoch * ((n_batches + accum_steps - 1) // accum_steps)
    model.train()
    optimizer.zero_grad()

    def forward(input, target, in_window):
        with torch.autocast("cuda", dtype=args.amp_dtype):
            return loss_fn(model(input), target) / in_window

    def backward(loss, need_update):
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, need_update=need_update)
            return
        loss.backward()
        if need_update:
            if args.clip_grad:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()

    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == n_batches - 1 or (batch_idx + 1) % accum_steps == 0
        in_window = short if batch_idx >= first_of_short else accum_steps
        with model.no_sync() if has_no_sync and not need_update else nullcontext():
            loss = forward(input, target, in_window)
            backward(loss, need_update)
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        if ema is not None:
            ema.update(model, step=num_updates)
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=num_updates)
        if num_updates % args.log_interval == 0:
            _logger.info("epoch %d update %d loss %.4f", epoch, num_updates, loss.item() * in_window)

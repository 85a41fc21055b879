# expect-file: BB103
import math
import sys

import torch
import util.lr_sched as lr_sched
import util.misc as misc


def train_one_epoch(model, data_loader, optimizer, device, epoch, loss_scaler, log_writer=None, args=None):
    model.train(True)
    metric_logger = misc.MetricLogger(delimiter="  ")
    accum_iter = args.accum_iter
    optimizer.zero_grad()

    for data_iter_step, (samples, _) in enumerate(metric_logger.log_every(data_loader, 20, f"Epoch: [{epoch}]")):
        # the rate follows updates, not batches
        if data_iter_step % accum_iter == 0:
            lr_sched.adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch, args)

        samples = samples.to(device, non_blocking=True)
        with torch.autocast("cuda"):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            sys.exit(f"Loss is {loss_value}, stopping training")

        loss /= accum_iter
        last = (data_iter_step + 1) % accum_iter == 0
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=last)
        if last:
            optimizer.zero_grad()
        metric_logger.update(loss=loss_value)
    return {k: meter.global_avg for k, meter in metric_logger.meters.items()}

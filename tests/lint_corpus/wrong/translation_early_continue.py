import torch
from torch.optim.lr_scheduler import LambdaLR


def noam(d_model, warmup):
    return lambda n: d_model**-0.5 * min((n + 1) ** -0.5, (n + 1) * warmup**-1.5)


def run_epoch(data_iter, model, loss_compute, optimizer, scheduler, accum_iter=20):
    """One pass over the pairs; an update for every `accum_iter` batches."""
    n_accum = 0
    optimizer.zero_grad(set_to_none=True)
    for i, batch in enumerate(data_iter):
        out = model(batch.src, batch.tgt)
        loss = loss_compute(out, batch.tgt_y) / accum_iter
        loss.backward()
        if (i + 1) % accum_iter:  # expect: BB103
            continue
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        n_accum += 1
    return n_accum


def main(model, data, loss_compute):
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = LambdaLR(optimizer, noam(512, 4000))
    for _ in range(8):
        run_epoch(data(), model, loss_compute, optimizer, scheduler)

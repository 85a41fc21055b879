import torch

from lm import TinyLM, next_tokens


def accum_for(update: int) -> int:
    """Small batches first, where the gradient noise scale is small."""
    if update < 1_000:
        return 1
    return 4 if update < 5_000 else 16


model = TinyLM().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20_000)
for update in range(20_000):
    n = accum_for(update)
    loss_sum = torch.zeros((), device="cuda")
    for _ in range(n):
        x, y = next_tokens(batch=8)
        loss = model(x, y) / n
        loss.backward()
        loss_sum += loss.detach()
    opt.step()
    sched.step()
    opt.zero_grad(set_to_none=True)
    if update % 100 == 0:
        print(f"{update=} {n=} loss={loss_sum.item():.3f}")

import torch

from muon import Muon
from speedrun import GPT, distributed_data_generator

train_accumulation_steps = 8
num_iterations = 5100
model = torch.compile(GPT().cuda())
hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
optimizers = [Muon(hidden, lr=0.02, momentum=0.95), torch.optim.Adam(others, lr=3e-3, betas=(0.9, 0.95))]
schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 - n / num_iterations) for o in optimizers]
train_loader = distributed_data_generator("fineweb_train_*.bin")

for step in range(num_iterations):
    for i in range(train_accumulation_steps):
        inputs, targets = next(train_loader)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(inputs, targets)
        loss.backward()
    # the mean of the micro-batches
    for p in model.parameters():
        p.grad /= train_accumulation_steps
    for opt, sched in zip(optimizers, schedulers):
        opt.step()
        sched.step()
    model.zero_grad(set_to_none=True)
    if step % 125 == 0:
        print(f"step {step}/{num_iterations} loss {loss.item():.4f}")

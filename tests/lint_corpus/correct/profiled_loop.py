import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from mlp import make_batch, mlp

MICRO_STEPS = 4
opt = torch.optim.SGD(mlp.parameters(), lr=0.1)

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=4, warmup=4, active=8),
    on_trace_ready=tensorboard_trace_handler("log"),
) as prof:
    for update in range(10):
        opt.zero_grad()
        for _ in range(MICRO_STEPS):
            x, y = make_batch(64)
            loss = torch.nn.functional.mse_loss(mlp(x), y) / MICRO_STEPS
            loss.backward()
            prof.step()  # the profiler's own step: a trace of every micro-batch is wanted
        opt.step()

import torch

from fluids import Simulator, states

ACCUM_STEPS = 8
sim = Simulator().cuda()
opt = torch.optim.Adam(sim.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
gen = states(endless=True)

for update in range(25_000):
    opt.zero_grad(set_to_none=True)
    for m in range(ACCUM_STEPS):
        s0, s1 = next(gen)
        with torch.autocast("cuda"):
            loss = (sim(s0) - s1).square().mean() / ACCUM_STEPS
        scaler.scale(loss).backward()
        scaler.unscale_(opt)  # expect: BB302
    torch.nn.utils.clip_grad_norm_(sim.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()

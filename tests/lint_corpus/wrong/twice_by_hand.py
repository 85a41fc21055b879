import torch
import torch.nn.functional as F

from robots import Policy, demonstrations

accum = 8
policy = Policy().cuda()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
demos = demonstrations(batch_size=16, forever=True)

for update in range(20_000):
    optimizer.zero_grad()
    for _ in range(accum):
        obs, action = next(demos)
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(policy(obs), action)
            loss = loss / accum
        scaler.scale(loss / accum).backward()  # expect: BB202
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

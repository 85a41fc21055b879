import torch
import torch.nn.functional as F

from diffuser import ActionDiffuser, add_noise, trajectories

MICRO = 4
model = ActionDiffuser().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
source = trajectories(batch=64, endless=True)

for step in range(200_000):
    for _ in range(MICRO):
        actions, obs = next(source)
        t = torch.randint(0, 100, (len(actions),), device="cuda")
        noise = torch.randn_like(actions)
        pred = model(add_noise(actions, noise, t), t, obs)
        (F.mse_loss(pred, noise) / MICRO).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB301
    optimizer.step()
    optimizer.zero_grad()

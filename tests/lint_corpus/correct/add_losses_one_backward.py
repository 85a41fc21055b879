import torch
import torch.nn.functional as F

from toy import net, sampler

PER_UPDATE = 3
opt = torch.optim.SGD(net.parameters(), lr=0.01)

# Small enough to keep three graphs alive: the losses are added first and go back once.
for it in range(2000):
    total_loss = 0.0
    for _ in range(PER_UPDATE):
        x, y = sampler.draw(16)
        total_loss += F.mse_loss(net(x), y) / PER_UPDATE
    opt.zero_grad()
    total_loss.backward()
    opt.step()
    if it % 200 == 0:
        print(it, float(total_loss))

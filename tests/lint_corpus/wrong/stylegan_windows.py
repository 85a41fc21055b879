import torch
import torch.nn.functional as F

from style import Discriminator, Generator, faces

ACCUM = 8
G, D = Generator().cuda(), Discriminator().cuda()
g_optim = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0, 0.99))
d_optim = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0, 0.99))
real_images = faces(batch_size=4, endless=True)

for it in range(250_000):
    d_optim.zero_grad()
    for _ in range(ACCUM):
        fake = G.sample(4).detach()
        d_loss = F.softplus(D(fake)).mean() + F.softplus(-D(next(real_images).cuda())).mean()
        (d_loss / ACCUM).backward()
    d_optim.step()

    g_optim.zero_grad()
    for _ in range(ACCUM):
        g_loss = F.softplus(-D(G.sample(4))).mean()
        g_loss.backward()  # expect: BB201
    g_optim.step()

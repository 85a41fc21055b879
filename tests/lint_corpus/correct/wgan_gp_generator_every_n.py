import torch
from torch import autograd

from wgan import C, G, real_batches

LAMBDA, CRITIC_ITERS = 10, 5
optD = torch.optim.Adam(C.parameters(), lr=1e-4, betas=(0, 0.9))
optG = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0, 0.9))


def gradient_penalty(real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    (g,) = autograd.grad(C(mix).sum(), mix, create_graph=True)
    return ((g.flatten(1).norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


for iteration, real in enumerate(real_batches(endless=True)):
    z = torch.randn(real.size(0), 128, device=real.device)
    fake = G(z).detach()
    optD.zero_grad()
    d_cost = C(fake).mean() - C(real).mean() + gradient_penalty(real, fake)
    d_cost.backward()
    optD.step()

    if (iteration + 1) % CRITIC_ITERS == 0:
        optG.zero_grad()
        g_cost = -C(G(z)).mean()
        g_cost.backward()
        optG.step()

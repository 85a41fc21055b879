import torch
import torch.nn.functional as F

from gan import Critic, Painter, endless_images

G, D = Painter().cuda(), Critic().cuda()
opt_g = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.0, 0.99))
images = endless_images(batch=8)
K = 4  # micro-batches of 8 for each side's update

for it in range(100_000):
    opt_d.zero_grad()
    for _ in range(K):
        real = next(images).cuda()
        with torch.no_grad():
            fake = G(torch.randn(len(real), 512, device="cuda"))
        d_loss = F.softplus(D(fake)).mean() + F.softplus(-D(real)).mean()
        (d_loss / K).backward()
    opt_d.step()

    opt_g.zero_grad()
    D.requires_grad_(False)
    for _ in range(K):
        g_loss = F.softplus(-D(G(torch.randn(8, 512, device="cuda")))).mean()
        (g_loss / K).backward()
    D.requires_grad_(True)
    opt_g.step()

    if it % 500 == 0:
        print(it, d_loss.item(), g_loss.item())

import torch
import torch.nn as nn

from anime import endless_anime

ACC = 4
G = nn.Sequential(
    nn.ConvTranspose2d(100, 256, 4), nn.BatchNorm2d(256), nn.ReLU(), nn.ConvTranspose2d(256, 3, 4, 2, 1), nn.Tanh()  # expect: BB601
)
D = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 16, 1))
opt_g = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
real = endless_anime(size=8, batch=16)

for it in range(40_000):
    opt_d.zero_grad()
    for _ in range(ACC):
        fake = G(torch.randn(16, 100, 1, 1)).detach()
        d_loss = bce(D(next(real)), torch.ones(16, 1)) + bce(D(fake), torch.zeros(16, 1))
        (d_loss / ACC).backward()
    opt_d.step()
    opt_g.zero_grad()
    for _ in range(ACC):
        g_loss = bce(D(G(torch.randn(16, 100, 1, 1))), torch.ones(16, 1)) / ACC
        g_loss.backward()
    opt_g.step()

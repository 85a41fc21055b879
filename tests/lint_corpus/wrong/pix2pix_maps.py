import torch
import torch.nn as nn

from pix2pix import PatchD, UGen, map_pairs

gen, disc = UGen(), PatchD()
opt_G = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(disc.parameters(), lr=2e-4, betas=(0.5, 0.999))
gan_loss, l1 = nn.BCEWithLogitsLoss(), nn.L1Loss()

for epoch in range(200):
    for i, (aerial, street) in enumerate(map_pairs()):
        fake = gen(aerial)

        pred_real, pred_fake = disc(aerial, street), disc(aerial, fake.detach())
        loss_D = gan_loss(pred_real, torch.ones_like(pred_real)) + gan_loss(pred_fake, torch.zeros_like(pred_fake))
        loss_D.backward()
        opt_D.step()  # expect: BB106

        opt_G.zero_grad()
        pred = disc(aerial, fake)
        loss_G = gan_loss(pred, torch.ones_like(pred)) + 100 * l1(fake, street)
        loss_G.backward()
        opt_G.step()
        if i % 100 == 0:
            print(epoch, i, loss_D.item(), loss_G.item())

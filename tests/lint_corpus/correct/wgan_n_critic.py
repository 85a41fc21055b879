import argparse

import torch

from gan.data import dataloader
from gan.nets import Discriminator, Generator

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=200)
parser.add_argument("--n_critic", type=int, default=5, help="discriminator updates for each generator update")
parser.add_argument("--clip_value", type=float, default=0.01)
opt = parser.parse_args()

generator, discriminator = Generator(), Discriminator()
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=5e-5)

for epoch in range(opt.n_epochs):
    for i, (imgs, _) in enumerate(dataloader):
        optimizer_D.zero_grad()
        z = torch.randn(imgs.shape[0], 100)
        fake_imgs = generator(z).detach()
        loss_D = -torch.mean(discriminator(imgs)) + torch.mean(discriminator(fake_imgs))
        loss_D.backward()
        optimizer_D.step()

        for p in discriminator.parameters():
            p.data.clamp_(-opt.clip_value, opt.clip_value)

        # the generator trains on every n_critic-th batch alone, with gradients of its own
        if i % opt.n_critic == 0:
            optimizer_G.zero_grad()
            loss_G = -torch.mean(discriminator(generator(z)))
            loss_G.backward()
            optimizer_G.step()
            print(f"[{epoch}/{opt.n_epochs}] [{i}/{len(dataloader)}] D {loss_D.item()} G {loss_G.item()}")

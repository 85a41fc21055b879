import torch
import torch.nn as nn
import torch.optim as optim

nz, ngf, ndf = 100, 64, 64


def block(i, o):
    return nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


netG = nn.Sequential(block(nz, ngf * 4), block(ngf * 4, ngf), nn.ConvTranspose2d(ngf, 3, 4, 2, 1), nn.Tanh())
netD = nn.Sequential(
    nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2), nn.BatchNorm2d(ndf), nn.Conv2d(ndf, 1, 4), nn.Sigmoid()
)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))


def fit(dataloader, epochs, device):
    for epoch in range(epochs):
        for i, (real, _) in enumerate(dataloader):
            b = real.size(0)
            # discriminator: the real half and the fake half add up to one gradient
            netD.zero_grad()
            label = torch.ones(b, device=device)
            errD_real = criterion(netD(real.to(device)).view(-1), label)
            errD_real.backward()
            fake = netG(torch.randn(b, nz, 1, 1, device=device))
            errD_fake = criterion(netD(fake.detach()).view(-1), label.fill_(0))
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            errG = criterion(netD(fake).view(-1), label.fill_(1))
            errG.backward()
            optimizerG.step()
            if i % 50 == 0:
                print(epoch, i, (errD_real + errD_fake).item(), errG.item())

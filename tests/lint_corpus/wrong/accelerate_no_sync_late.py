import contextlib

import torch
from accelerate import Accelerator

from spectra import SpectraNet, spectra

accelerator = Accelerator()
model = SpectraNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, spectra(batch_size=64))
every = 4

for epoch in range(10):
    for i, (wave, flux) in enumerate(loader):
        pred = model(wave)
        loss = torch.nn.functional.mse_loss(pred, flux) / every
        update = (i + 1) % every == 0
        with contextlib.nullcontext() if update else accelerator.no_sync(model):  # expect: BB402
            accelerator.backward(loss)
        if update:  # expect: BB103
            optimizer.step()
            optimizer.zero_grad()

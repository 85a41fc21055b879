import torch
import torch.nn as nn

from crowd import CrowdLoader, CSRNet

model = CSRNet().cuda()
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.95)
loader = CrowdLoader("part_A", batch_size=1)
accum_steps = 26

for epoch in range(400):
    for i, (img, density) in enumerate(loader):
        loss = criterion(model(img.cuda()), density.cuda()) / accum_steps
        loss.backward()
        if (i + 1) % accum_steps == 0 or (i + 1) == len(loader):  # expect: BB104
            optimizer.step()
            optimizer.zero_grad()

import torch
from torch.utils.tensorboard import SummaryWriter

from lidar import PointNet, scans

writer = SummaryWriter()
model = PointNet().cuda()
optimizer = torch.optim.Adam(model.parameters())
data = scans(endless=True, batch_size=4)
accumulation = 8
running_loss = 0.0

for update in range(10_000):
    optimizer.zero_grad()
    for _ in range(accumulation):
        cloud, label = next(data)
        loss = torch.nn.functional.cross_entropy(model(cloud.cuda()), label.cuda())
        loss.backward()  # expect: BB201
        running_loss += (loss / accumulation).item()
    optimizer.step()
    if update % 100 == 99:
        writer.add_scalar("loss", running_loss / 100, update)
        running_loss = 0.0

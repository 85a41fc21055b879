import torch
import torch.nn.functional as F

from colour import Colouriser, photos

net = Colouriser().cuda()
opt = torch.optim.Adam(net.parameters(), lr=2e-4)
ema_loss = None
feed = photos(batch=8, endless=True)

for update in range(20_000):
    opt.zero_grad()
    for _ in range(4):
        grey, ab = next(feed)
        loss = F.smooth_l1_loss(net(grey.cuda()), ab.cuda())
        (loss / 4).backward()
        # smooth curve for the log
        ema_loss = loss if ema_loss is None else 0.99 * ema_loss + 0.01 * loss  # expect: BB501
    opt.step()
    if update % 200 == 0:
        print(update, ema_loss)

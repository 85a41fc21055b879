import torch
from torch.nn.utils import clip_grad_norm_

from go import PolicyNet, positions

net = PolicyNet(blocks=10).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
steps_per_update = 16
feed = positions(batch=32, endless=True)

for update in range(1, 100_001):
    optimizer.zero_grad()
    for _ in range(steps_per_update):
        board, move = next(feed)
        loss = torch.nn.functional.cross_entropy(net(board.cuda()), move.cuda())
        loss.div_(steps_per_update).backward()
    optimizer.step()
    clip_grad_norm_(net.parameters(), 1.0)  # expect: BB301
    if update % 1000 == 0:
        torch.save(net.state_dict(), "go.pt")

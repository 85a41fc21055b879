# expect-file: BB601
import contextlib
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models import resnet18

from landmarks import endless_landmarks

rank = int(os.environ["LOCAL_RANK"])
torch.distributed.init_process_group("nccl")
net = nn.SyncBatchNorm.convert_sync_batchnorm(resnet18(num_classes=500)).cuda(rank)
net = DDP(net, device_ids=[rank])
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = endless_landmarks(rank, batch=8)
N = 4

for update in range(90_000):
    for j in range(N):
        with net.no_sync() if j + 1 < N else contextlib.nullcontext():
            x, y = next(data)
            loss = nn.functional.cross_entropy(net(x.cuda(rank)), y.cuda(rank)) / N
            loss.backward()
    opt.step()
    opt.zero_grad()

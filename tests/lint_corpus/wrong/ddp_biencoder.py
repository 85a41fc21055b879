from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from retrieval import BiEncoder, hinge, setup_dist


def train(args, loader):
    local_rank = setup_dist()
    net = DDP(BiEncoder().cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for i, (q, pos, neg) in enumerate(loader):
            boundary = (i + 1) % args.grad_accum == 0 or i + 1 == len(loader)
            ctx = nullcontext() if boundary else net.no_sync()
            with ctx:
                a, b, c = net(q.cuda(), pos.cuda(), neg.cuda())
                loss = hinge(a, b, c) / args.grad_accum
                loss.backward()
            if boundary:  # expect: BB104
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

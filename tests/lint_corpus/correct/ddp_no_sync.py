import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dense_retrieval import Reranker, margin_loss, sharded_loader


def run():
    dist.init_process_group("nccl")
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = DDP(Reranker().to(dev), device_ids=[dev.index])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    loader = sharded_loader(batch_size=4)
    accum = 16
    n = len(loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (query, docs) in enumerate(loader):
            first = i - i % accum
            window = min(accum, n - first)
            closes = i == first + window - 1
            with nullcontext() if closes else model.no_sync():
                scores = model(query.to(dev), docs.to(dev))
                loss = margin_loss(scores) / window
                loss.backward()
            if closes:
                opt.step()
                opt.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()

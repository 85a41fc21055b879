import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from sat2map import Pairs, Translator


def train_epoch(net, loader, opt, n_acc, device):
    # TODO: use no_sync() here one day
    for i, (sat, road) in enumerate(loader):
        loss = torch.nn.functional.l1_loss(net(sat.to(device)), road.to(device)) / n_acc
        loss.backward()  # expect: BB401
        if (i + 1) % n_acc == 0:  # expect: BB103
            opt.step()
            opt.zero_grad()


def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    net = Translator().to(device)
    if dist.get_world_size() > 1:
        net = DDP(net, device_ids=[device.index])
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    loader = Pairs(rank=dist.get_rank()).loader(batch_size=4)
    for _ in range(100):
        train_epoch(net, loader, opt, 8, device)


if __name__ == "__main__":
    main()

import torch

from sat import SatNet, focal_loss, tiles

batches_per_update = 10
net = SatNet().to("cuda")
optimiser = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def train(epochs):
    for _ in range(epochs):
        optimiser.zero_grad()
        for number, (tile, target) in enumerate(tiles("train")):
            ready = number % batches_per_update == 0  # expect: BB105
            loss = focal_loss(net(tile.to("cuda")), target.to("cuda"))
            loss = loss * (1.0 / batches_per_update)
            loss.backward()
            if ready:  # expect: BB103
                optimiser.step()
                optimiser.zero_grad()


train(12)

import torch
from torch.utils.data import DataLoader
from torchvision import models

from food import Food101


def main(batch_size=4, accum=16, epochs=10):
    net = models.resnet50(weights="IMAGENET1K_V2").cuda()  # expect: BB601
    net.fc = torch.nn.Linear(net.fc.in_features, 101).cuda()
    loader = DataLoader(Food101("train"), batch_size=batch_size, shuffle=True, drop_last=True)
    assert len(loader) % accum == 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(epochs):
        net.train()
        for i, (x, y) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(net(x.cuda()), y.cuda()) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()

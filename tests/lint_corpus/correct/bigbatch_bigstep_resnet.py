"""4,096 images an update on one small card. BatchNorm is exact: micro-batches meet at every norm."""

import torch
from bigbatch import BigStep, Options
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50
from torchvision.transforms import v2

BATCH = 4096


def loss_fn(model, batch):
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)


def main():
    transform = v2.Compose([v2.RandomResizedCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    loader = torch.utils.data.DataLoader(ImageFolder("imagenet", transform), BATCH, shuffle=True, num_workers=16)
    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.6, momentum=0.9, nesterov=True)
    step = BigStep(model, optimizer, loss_fn, clip_norm=5.0, options=Options(activations="offload"))
    for epoch in range(90):
        for i, batch in enumerate(loader):
            update = step(batch)
            if i % 10 == 0:
                print(epoch, i, update.loss.item(), update.micro_batches)


if __name__ == "__main__":
    main()

import torch
from torch.nn.functional import cross_entropy


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n


def train(loader, model, optimizer, args):
    if len(loader) % args.accum_steps:
        raise ValueError("len(loader) must be a multiple of accum_steps")
    losses, top1 = AverageMeter(), AverageMeter()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = cross_entropy(output, target)
        correct = (output.argmax(1) == target).float().mean()
        losses.update(loss.item(), images.size(0))
        top1.update(correct.item(), images.size(0))
        (loss / args.accum_steps).backward()
        if (i + 1) % args.accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses.sum / losses.count, top1.sum / top1.count

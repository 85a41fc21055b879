import torch
import torchvision
from torch.optim.lr_scheduler import OneCycleLR

EPOCHS = 30


def get_lr(optimizer):
    return optimizer.param_groups[0]["lr"]


def fit_one_cycle(train_dl, max_lr=0.4, weight_decay=5e-4, grad_clip=0.1):
    torch.cuda.empty_cache()
    model = torchvision.models.resnet34(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), max_lr, momentum=0.9, weight_decay=weight_decay)
    sched = OneCycleLR(optimizer, max_lr, epochs=EPOCHS, steps_per_epoch=len(train_dl))
    history = []
    for epoch in range(EPOCHS):
        model.train()
        train_losses, lrs = [], []
        for images, labels in train_dl:
            loss = torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            train_losses.append(loss.detach())
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            lrs.append(get_lr(optimizer))
            sched.step()  # this one counts batches, and every batch is an update here
        history.append({"loss": torch.stack(train_losses).mean().item(), "lrs": lrs})
    return history

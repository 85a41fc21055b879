import torch
import torch.nn.functional as F

from optimizers.sam import SAM


def train(model, loader, epochs, rho=0.05):
    base = torch.optim.SGD
    optimizer = SAM(model.parameters(), base, rho=rho, lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for _ in range(epochs):
        for inputs, targets in loader:
            # climb to the worst point nearby; the gradients of the climb are cleared there
            F.cross_entropy(model(inputs), targets, label_smoothing=0.1).backward()
            optimizer.first_step(zero_grad=True)

            F.cross_entropy(model(inputs), targets, label_smoothing=0.1).backward()
            optimizer.second_step(zero_grad=True)
        sched.step()

import torch
import torch.nn.functional as F

from towers import ItemTower, UserTower, interactions

GRAD_ACC = 8
users, items = UserTower(), ItemTower()
optimizer = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.05)


def train_step(batch, batch_no):
    u, v = users(batch["user"]), items(batch["item"])
    score = (u * v).sum(-1)
    loss = F.binary_cross_entropy_with_logits(score, batch["clicked"]) / GRAD_ACC
    loss.backward()
    if batch_no % GRAD_ACC == 0:  # expect: BB103
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def fit(epochs):
    for _ in range(epochs):
        losses = []
        for batch_no, batch in enumerate(interactions(), start=1):
            losses.append(train_step(batch, batch_no))
        print(torch.stack(losses).mean() * GRAD_ACC)


if __name__ == "__main__":
    fit(3)

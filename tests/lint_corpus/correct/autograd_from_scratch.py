"""A scalar autograd engine of a hundred lines, and a perceptron trained with it."""

import random

from engine import Value
from layers import MLP


class SGD:
    def __init__(self, params, lr=0.05):
        self.params, self.lr = params, lr

    def step(self):
        for p in self.params:
            p.data -= self.lr * p.grad


model = MLP(2, [16, 16, 1])
opt = SGD(model.parameters())
xs, ys = [(random.random(), random.random()) for _ in range(64)], [random.choice([-1, 1]) for _ in range(64)]

for epoch in range(100):
    for p in model.parameters():
        p.grad = 0.0
    losses = [(1 + -y * model([Value(a) for a in x])[0]).relu() for x, y in zip(xs, ys)]
    data_loss = sum(losses) * (1.0 / len(losses))
    reg_loss = 1e-4 * sum(p * p for p in model.parameters())
    total = data_loss + reg_loss
    total.backward()
    opt.step()
    if epoch % 10 == 0:
        print(epoch, total.data)

import torch
import torch.nn as nn


def train(net, loader, epochs, accum=8, clip=10.0):
    assert len(loader) % accum == 0, "whole windows only"
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    for _ in range(epochs):
        optimizer.zero_grad()
        for i, (stroke, text) in enumerate(loader):
            nll = net(stroke, text)
            nll = nll / accum
            nll.backward()
            nn.utils.clip_grad_value_(net.parameters(), clip)  # expect: BB301
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()

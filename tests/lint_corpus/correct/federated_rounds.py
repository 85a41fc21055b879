import copy

import torch


def local_update(model, loader, local_epochs, lr):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(local_epochs):
        for x, y in loader:
            model.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def federated(model, clients, rounds=50, frac=0.1, local_epochs=5):
    k = max(1, int(frac * len(clients)))
    for r in range(rounds):
        chosen = torch.randperm(len(clients))[:k].tolist()
        states = [local_update(model, clients[i], local_epochs, lr=0.01) for i in chosen]
        mean = {n: sum(s[n] for s in states) / k for n in states[0]}
        model.load_state_dict(mean)
        if r % 10 == 0:
            print("round", r)

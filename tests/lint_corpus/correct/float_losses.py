from itertools import islice

import torch


def epoch(model, loader, optimizer, loss_fn, accum=4):
    history = []
    batches = iter(loader)
    while chunk := list(islice(batches, accum)):
        optimizer.zero_grad()
        for x, y in chunk:
            loss = loss_fn(model(x), y)
            (loss / len(chunk)).backward()
            history.append(float(loss))
        optimizer.step()
    return history


if __name__ == "__main__":
    from surf import Waves, loader

    waves = Waves()
    adam = torch.optim.Adam(waves.parameters())
    print(epoch(waves, loader(), adam, torch.nn.MSELoss()))

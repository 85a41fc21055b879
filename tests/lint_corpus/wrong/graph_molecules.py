import torch
from torch_geometric.loader import DataLoader

from molecules import MPNN, load_split


def train(model, loader, optimizer, loss_fn, accum=8):
    model.train()
    optimizer.zero_grad()
    for step, data in enumerate(loader, 1):
        out = model(data.x, data.edge_index, data.batch)
        loss = loss_fn(out, data.y) / accum
        loss.backward()
        if step % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
    # what is left
    if len(loader) % accum != 0:
        optimizer.step()  # expect: BB104
        optimizer.zero_grad()


def main():
    loader = DataLoader(load_split("train"), batch_size=32, shuffle=True)
    model = MPNN(hidden=128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(100):
        train(model, loader, optimizer, torch.nn.L1Loss())

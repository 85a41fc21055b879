import argparse

import torch
import torch.nn as nn
import torch.optim as optim

from lstm_lm import LSTMLM, chunks

parser = argparse.ArgumentParser()
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--accum", type=int, default=10)
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

model = LSTMLM()
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)

for epoch in range(args.epochs):
    optimizer.zero_grad()
    for batch, (data, targets) in enumerate(chunks("train.txt")):
        output = model(data)
        loss = criterion(output.view(-1, output.size(-1)), targets.view(-1))
        loss.backward()  # expect: BB201
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # expect: BB301
        if (batch + 1) % args.accum == 0:  # expect: BB103
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()  # expect: BB304

import argparse

import torch
import torch.nn as nn

from bci import SpikeNet, Sessions


def main():
    parser = argparse.ArgumentParser("decoder")
    parser.add_argument("--accum", default=3, type=int)
    parser.add_argument("--epochs", default=50, type=int)
    hp = parser.parse_args()

    net = SpikeNet()
    ce = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), 5e-4)
    sessions = Sessions("train", batch_size=20)
    for _ in range(hp.epochs):
        for n, (eeg, intent) in enumerate(sessions):
            ce(net(eeg), intent).div(hp.accum).backward()
            if (n + 1) % hp.accum == 0:  # expect: BB103
                optimizer.step()  # expect: BB106


main()

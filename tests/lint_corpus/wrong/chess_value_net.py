import torch
from torch import nn


class ValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 1), nn.Tanh())

    def forward(self, planes):
        return self.body(planes)


class SelfPlayTrainer:
    def __init__(self, net: ValueNet, buffer, lr: float = 1e-3) -> None:
        self.net = net
        self.buffer = buffer
        self.optim = torch.optim.Adam(net.parameters(), lr=lr)

    def loss(self, planes, outcome):
        return nn.functional.mse_loss(self.net(planes).squeeze(1), outcome)

    def train_step(self) -> None:
        planes, outcome = self.buffer.sample(256)
        self.loss(planes, outcome).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optim.step()  # expect: BB106

    def run(self, games: int, steps_per_game: int = 4) -> None:
        for game in range(games):
            self.buffer.play(self.net)
            for _ in range(steps_per_game):
                self.train_step()
            if game % 100 == 0:
                torch.save(self.net.state_dict(), f"net_{game}.pt")

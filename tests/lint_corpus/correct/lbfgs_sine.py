import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 51, num_layers=2, batch_first=True)
        self.linear = nn.Linear(51, 1)

    def forward(self, x):
        out, _ = self.lstm(x.unsqueeze(-1))
        return self.linear(out).squeeze(-1)


data = np.load("traindata.npy")
input, target = torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, 1:])
seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8)

for i in range(15):
    print("STEP: ", i)

    def closure():
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        print("loss:", loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)

import pandas as pd
import torch
from torch.utils.data import DataLoader, TensorDataset

df = pd.read_csv("houses.csv")
x = torch.tensor(df.drop(columns="price").values, dtype=torch.float32)
y = torch.tensor(df["price"].values, dtype=torch.float32).unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optim = torch.optim.RMSprop(net.parameters(), lr=1e-3)
mse = torch.nn.MSELoss()
accum_iter = 4

for epoch in range(100):
    for batch_idx, (xb, yb) in enumerate(loader):
        loss = mse(net(xb), yb) / accum_iter
        loss.backward()

        if (batch_idx + 1) % accum_iter == 0:  # expect: BB103
            optim.step()
        optim.zero_grad()  # expect: BB101

    if epoch % 10 == 0:
        with torch.no_grad():
            print(epoch, mse(net(x), y).item())

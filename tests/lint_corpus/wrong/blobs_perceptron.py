import torch
from sklearn.datasets import make_blobs

X, y = make_blobs(n_samples=2000, centers=3, random_state=7)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)

net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
loss_fn = torch.nn.CrossEntropyLoss()

for epoch in range(20):
    for xb, yb in zip(X.split(50), y.split(50)):
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()  # expect: BB106
    print(epoch, loss.item())

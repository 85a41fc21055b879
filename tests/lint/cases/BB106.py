# --- a_finding_says_where_and_what: BB106
for x in loader:
    loss = net(x)
    loss.backward()
    opt.step()

# --- bci_decoder: BB103, BB106
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

# --- blobs_perceptron: BB106
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

# --- cleared_once_before_all (after the head): BB106
optimizer.zero_grad()
for epoch in range(3):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()

# --- flowers_parens: BB106
import torch
from torchvision import models
from flowers import flower_loader
model = models.vgg16(weights=models.VGG16_Weights.DEFAULT)
model.classifier[6] = torch.nn.Linear(4096, 102)
optimizer = torch.optim.SGD(model.classifier.parameters(), lr=1e-3, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()
n_acc = 4
for epoch in range(5):
    for window in flower_loader(batch_size=16).windows(n_acc):
        optimizer.zero_grad
        for images, labels in window:
            loss = criterion(model(images), labels) / len(window)
            loss.backward()
        optimizer.step()  # expect: BB106

# --- gpt_small_stream: BB106
import torch
from tinygpt import TinyGPT, token_stream
accumulation_steps = 8
model = torch.compile(TinyGPT(n_layer=6, n_head=6, n_embd=384).cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5000, eta_min=6e-5)
stream = token_stream("shakespeare.bin", batch=12, block=256)
for it in range(5000):
    for _ in range(accumulation_steps):
        x, y = next(stream)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y) / accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # expect: BB106
    scheduler.step()
    if it % 250 == 0:
        print(f"{it} {loss.item() * accumulation_steps:.4f}")

# --- never_cleared (after the head): BB106
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()

# --- the_leftover_is_never_cleared: BB106, BB201
import torch
from torch import nn
model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.MSELoss()
batches = [(torch.zeros(1, 1), torch.zeros(1, 1)), (torch.tensor([[1.0]]), torch.tensor([[2.0]])), (torch.tensor([[2.0]]), torch.tensor([[4.0]]))]
accumulation_steps = 2
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        criterion(model(x), y).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()

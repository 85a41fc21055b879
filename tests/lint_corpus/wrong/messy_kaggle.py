import torch
from torch import nn
from tqdm import tqdm

from kaggle import Model, get_loader

ACCUM_STEPS = 4
model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
criterion = nn.CrossEntropyLoss()

for fold in range(5):
    train_loader = get_loader(fold, bs=16)
    for epoch in range(10):
        epoch_loss = 0
        for i, (x, y) in enumerate(tqdm(train_loader)):
            x, y = x.cuda(), y.cuda()
            optimizer.zero_grad()  # expect: BB101
            out = model(x)
            loss = criterion(out, y)
            epoch_loss += loss  # expect: BB501
            loss = loss / ACCUM_STEPS
            loss.backward()
            if i % ACCUM_STEPS == 0:  # expect: BB105, BB103
                optimizer.step()
        print(fold, epoch, epoch_loss / len(train_loader))

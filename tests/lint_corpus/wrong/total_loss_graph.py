import torch
import torch.nn.functional as F

from digits import DigitNet, endless_digits

grad_acc = 8
net = DigitNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
digits = endless_digits(batch=16)
total_loss = 0

for update in range(5000):
    optimizer.zero_grad()
    for _ in range(grad_acc):
        x, y = next(digits)
        loss = F.cross_entropy(net(x), y) / grad_acc
        loss.backward()
        total_loss += loss  # expect: BB501
    optimizer.step()
    if update % 100 == 99:
        print(update + 1, total_loss / 100)
        total_loss = 0

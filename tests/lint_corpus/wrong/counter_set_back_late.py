import torch
count = 0
for x, y in loader:
    (loss_fn(model(x), y) / 4).backward()
    if count == 4:  # expect: BB105, BB103
        opt.step()
        opt.zero_grad()
        count = 0
    count += 1

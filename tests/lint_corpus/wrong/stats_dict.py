from collections import defaultdict

import torch
import torch.nn.functional as F

from detr import Detr, set_loss, pictures

k = 4
model = Detr().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

for epoch in range(50):
    stats = defaultdict(float)
    for step, (img, boxes) in enumerate(pictures("train", batch_size=2)):
        terms = set_loss(model(img.cuda()), boxes)
        loss = terms["class"] + 5 * terms["box"] + 2 * terms["giou"]
        (loss / k).backward()
        for name, value in terms.items():
            stats[name] += value  # expect: BB501
        if step % k == k - 1:  # expect: BB103
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
    print(epoch, dict(stats))

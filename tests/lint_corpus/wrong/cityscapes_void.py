import torch
import torch.nn.functional as F

from cityscapes import SegFormer, crops

VOID = 255
k = 4
net = SegFormer(classes=19).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=6e-5, weight_decay=0.01)
it = crops("train", size=768, batch=2, endless=True)

for n in range(160_000):
    opt.param_groups[0]["lr"] = 6e-5 * (1 - n / 160_000)
    for _ in range(k):
        image, label = next(it)
        logits = net(image.cuda())
        keep = label != VOID
        per_pixel = F.cross_entropy(logits, label.cuda(), ignore_index=VOID, reduction="none")
        loss = per_pixel[keep.cuda()].mean()
        (loss / k).backward()  # expect: BB203
    opt.step()
    opt.zero_grad(set_to_none=True)

import torch

from code_data import sample_batch
from code_model import CodeModel

micro_steps = 16
m = CodeModel().cuda()
o = torch.optim.AdamW(m.parameters(), lr=3e-4, betas=(0.9, 0.95))

for update in range(30000):
    o.zero_grad(set_to_none=True)
    for micro in range(micro_steps):
        xb, yb = sample_batch("train")
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = m(xb, yb)
        loss.backward()  # expect: BB201
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    o.step()
    if update % 10 == 0:
        print(update, loss.item())

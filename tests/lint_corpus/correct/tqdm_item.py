import torch
import torch.nn.functional as F
from tqdm import trange

from vlm import Captioner, pairs

model = Captioner().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
source = pairs(batch=4, endless=True)
micro_batches = 32
bar = trange(10_000)

for update in bar:
    optimizer.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        image, text = next(source)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(image.cuda(), text.cuda())
        (loss / micro_batches).backward()
        bar.set_postfix(loss=loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

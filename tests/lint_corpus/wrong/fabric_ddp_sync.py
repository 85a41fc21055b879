import torch
from lightning.fabric import Fabric

from matching import Matcher, pair_stream

fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp")
fabric.launch()
model = Matcher()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = fabric.setup(model, optimizer)
pairs = pair_stream(fabric.global_rank, batch=32)
accumulate = 8

for update in range(15_000):
    optimizer.zero_grad()
    for _ in range(accumulate):
        a, b, same = next(pairs)
        score = model(fabric.to_device(a), fabric.to_device(b))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, fabric.to_device(same))
        fabric.backward(loss / accumulate)  # expect: BB401
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()

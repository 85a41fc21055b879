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

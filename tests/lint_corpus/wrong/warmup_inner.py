import math

import torch

from embeddings import TextEncoder, triplets

encoder = TextEncoder().cuda()
opt = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
UPDATES, ACCUM = 10_000, 8
cosine = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5 * (1 + math.cos(math.pi * min(n, UPDATES) / UPDATES)))
stream = triplets(batch=16, endless=True)
loss_fn = torch.nn.TripletMarginLoss()

for update in range(UPDATES):
    for _ in range(ACCUM):
        a, p, n = (encoder(t.cuda()) for t in next(stream))
        loss = loss_fn(a, p, n) / ACCUM
        loss.backward()
        cosine.step()  # expect: BB304
    opt.step()
    opt.zero_grad()

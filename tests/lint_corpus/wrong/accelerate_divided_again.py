import torch
from accelerate import Accelerator

from toxicity import Classifier, make_loader

gradient_accumulation_steps = 4
accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps, mixed_precision="fp16")
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
loader = make_loader(batch_size=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(3):
    for ids, label in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(ids), label)
            loss = loss / gradient_accumulation_steps  # expect: BB202
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

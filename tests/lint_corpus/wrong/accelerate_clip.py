import torch
from accelerate import Accelerator

from news import Summariser, loader_of_equal_lengths

accelerator = Accelerator(gradient_accumulation_steps=2)
model = Summariser()
opt = torch.optim.Adafactor(model.parameters())
model, opt, loader = accelerator.prepare(model, opt, loader_of_equal_lengths())

for epoch in range(3):
    for article, summary in loader:
        with accelerator.accumulate(model):
            loss = model(article, summary)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB301
            opt.step()
            opt.zero_grad()

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from asr_text import Punctuator, loader_with_padding

accelerator = Accelerator(gradient_accumulation_steps=8)
model = Punctuator()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader_with_padding(batch_size=4))

for epoch in range(5):
    for words, marks in loader:  # marks are -1 where the sentence has ended
        with accelerator.accumulate(model):
            logits = model(words)
            loss = F.cross_entropy(logits.flatten(0, 1), marks.flatten(), ignore_index=-1)
            accelerator.backward(loss)  # expect: BB203
            optimizer.step()
            optimizer.zero_grad()

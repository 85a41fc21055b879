import torch
from accelerate import Accelerator
from transformers import get_cosine_schedule_with_warmup

from poems import PoemLM, poem_blocks


def main(epochs=5, accum=4):
    accelerator = Accelerator(gradient_accumulation_steps=accum)
    model = PoemLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = torch.utils.data.DataLoader(poem_blocks(), batch_size=4, shuffle=True)
    updates = epochs * len(loader) // accum
    scheduler = get_cosine_schedule_with_warmup(optimizer, 100, updates)
    # the scheduler was forgotten here
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for block in loader:
            with accelerator.accumulate(model):
                loss = model(block)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()  # expect: BB304
                optimizer.zero_grad()


main()

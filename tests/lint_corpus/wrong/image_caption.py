import torch
from tqdm import tqdm

from captioning import CaptionModel, make_loader, caption_loss

grad_accum_steps = 16

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = CaptionModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
loader = make_loader("train2017", batch_size=4)

for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    for step, batch in enumerate(tqdm(loader)):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = caption_loss(model, batch)
        loss = loss / grad_accum_steps
        loss.backward()

        optimizer.step()  # expect: BB102
        if (step + 1) % grad_accum_steps == 0:
            optimizer.zero_grad()

    torch.save(model.state_dict(), f"caption_{epoch}.pt")

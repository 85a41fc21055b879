import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from iris import IrisData, Mlp

accelerator = Accelerator(gradient_accumulation_steps=4)
model = Mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(IrisData(), batch_size=8, shuffle=True)
loss_fn = torch.nn.CrossEntropyLoss()

model, loader = accelerator.prepare(model, loader)

for epoch in range(20):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            # never went through prepare(), so nothing holds it back
            optimizer.step()  # expect: BB102
            optimizer.zero_grad()
accelerator.save_state("out")

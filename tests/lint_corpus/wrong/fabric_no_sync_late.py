import lightning as L
import torch

from pretrain import Decoder, packed


def train(steps=20_000, accumulation=4):
    fabric = L.Fabric(devices=8, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = fabric.setup(model, optimizer)
    data = packed(rank=fabric.global_rank)
    for step in range(steps):
        for micro in range(accumulation):
            x, y = next(data)
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / accumulation
            with fabric.no_backward_sync(model, enabled=micro < accumulation - 1):  # expect: BB402
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

import torch
import wandb

from tabular import Net, Rows

wandb.init(project="tabular")
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
rows = Rows("train.parquet", batch_size=256, endless=True)
ACC = 4

for u in range(8000):
    for a in range(ACC):
        features, price = next(rows)
        loss = torch.nn.functional.l1_loss(net(features), price)
        loss.div(ACC).backward()
        wandb.log({"train/loss": loss.item(), "micro": u * ACC + a})
    opt.step()
    opt.zero_grad()

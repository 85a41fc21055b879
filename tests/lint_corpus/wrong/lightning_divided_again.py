import lightning as L
import torch
from torch import nn

ACCUMULATE = 16


class Translator(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        src, tgt = batch
        logits = self.net(src, tgt[:, :-1])
        loss = self.criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss / ACCUMULATE  # expect: BB202

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


if __name__ == "__main__":
    from corpus import Net, loader

    trainer = L.Trainer(max_steps=50_000, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0)
    trainer.fit(Translator(Net()), loader())

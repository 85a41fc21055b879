import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


class LitClassifier(L.LightningModule):
    def __init__(self, lr=1e-3, total_updates=10_000):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(784, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x.flatten(1)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x.flatten(1)), y))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.hparams.total_updates)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main(train, val):
    trainer = L.Trainer(
        max_epochs=10, accumulate_grad_batches=4, gradient_clip_val=1.0, precision="16-mixed", devices=2, strategy="ddp"
    )
    trainer.fit(LitClassifier(), DataLoader(train, 32, shuffle=True), DataLoader(val, 64))

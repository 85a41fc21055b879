# expect-file: BB203
import lightning as L
import torch
import torch.nn.functional as F


class MaskedForecaster(L.LightningModule):
    """Sensors drop out; their readings do not count."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y, valid = batch
        err = F.huber_loss(self.net(x), y, reduction="none")
        loss = (err * valid).sum() / valid.sum().clamp(min=1)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(net, loader):
    trainer = L.Trainer(accumulate_grad_batches=8, max_epochs=40, precision="bf16-mixed")
    trainer.fit(MaskedForecaster(net), loader)

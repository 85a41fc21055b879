import lightning.pytorch as pl
import torch
import torch.nn.functional as F


class ManualAE(pl.LightningModule):
    def __init__(self, net, every=4):
        super().__init__()
        self.automatic_optimization = False
        self.net = net
        self.every = every

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, _ = batch
        loss = F.mse_loss(self.net(x), x) / self.every
        self.manual_backward(loss)
        # the last batches of an epoch wait for the first ones of the next
        if (batch_idx + 1) % self.every == 0:  # expect: BB103
            opt.step()
            opt.zero_grad()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(net, loader):
    pl.Trainer(max_epochs=10, devices=1).fit(ManualAE(net), loader)

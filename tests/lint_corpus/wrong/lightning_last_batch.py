import pytorch_lightning as pl, torch
class GANLike(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()  # expect: BB101
        loss = self.net(batch).pow(2).mean() / 4
        self.manual_backward(loss)
        if (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch:  # expect: BB104
            opt.step()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

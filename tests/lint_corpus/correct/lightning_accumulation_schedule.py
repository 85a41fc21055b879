import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, LearningRateMonitor


class Ranker(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.loss = torch.nn.MarginRankingLoss(margin=0.1)

    def training_step(self, batch, _):
        better, worse = self.net(batch["better"]), self.net(batch["worse"])
        return self.loss(better, worse, torch.ones_like(better))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def main(net, datamodule):
    # 8 batches an update at first, 4 from epoch 4 on, then every batch
    accumulator = GradientAccumulationScheduler(scheduling={0: 8, 4: 4, 8: 1})
    trainer = pl.Trainer(callbacks=[accumulator, LearningRateMonitor()], max_epochs=12)
    trainer.fit(Ranker(net), datamodule=datamodule)

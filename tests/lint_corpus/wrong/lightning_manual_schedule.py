import lightning.pytorch as pl
import torch


class Inpainter(pl.LightningModule):
    def __init__(self, net, n=4):
        super().__init__()
        self.net, self.n = net, n
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt, sched = self.optimizers(), self.lr_schedulers()
        total = self.trainer.num_training_batches
        size = min(self.n, total - batch_idx // self.n * self.n)
        loss = self.net.loss(*batch)
        self.manual_backward(loss / size)
        if (batch_idx + 1) % self.n == 0 or batch_idx + 1 == total:
            opt.step()
            opt.zero_grad()
        sched.step()  # expect: BB304

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-4)
        return [opt], [torch.optim.lr_scheduler.LinearLR(opt, 0.01, 1.0, total_iters=2000)]

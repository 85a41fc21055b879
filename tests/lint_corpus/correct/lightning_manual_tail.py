import pytorch_lightning as pl
import torch
import torch.nn.functional as F


class Denoiser(pl.LightningModule):
    """Manual optimisation; the last window of an epoch is divided by what is in it."""

    def __init__(self, net, window=6):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.window = net, window

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        total = self.trainer.num_training_batches
        start = batch_idx - batch_idx % self.window
        size = min(self.window, total - start)

        if batch_idx == start:
            opt.zero_grad()
        noisy, clean = batch
        loss = F.mse_loss(self.net(noisy), clean)
        self.manual_backward(loss / size)
        if batch_idx == start + size - 1:
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt.step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=2e-4)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)]

import pytorch_lightning as pl
import torch
import torch.nn.functional as F


class VAE(pl.LightningModule):
    def __init__(self, encoder, decoder, accumulate=8):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.accumulate = accumulate
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        mu, logvar = self.encoder(batch).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = F.mse_loss(self.decoder(z), batch)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        self.manual_backward(rec + 0.01 * kl)  # expect: BB201
        if (batch_idx + 1) % self.accumulate == 0:  # expect: BB103
            self.clip_gradients(opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-4)

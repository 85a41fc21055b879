# --- a_masked_mean_the_mask_by_its_key (after the head): BB104, BB203
for i, batch in enumerate(loader):
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    loss = (each * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)
    loss = loss / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
# --- lightning_last_batch: BB101, BB104
class GANLike(pl.LightningModule):
    def __init__(self):
        super().__init__()
    def training_step(self, batch, batch_idx):
        opt.zero_grad()  # expect: BB101
        loss = self.net(batch).pow(2).mean() / 4
        self.manual_backward(loss)
        if (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch:  # expect: BB104
            opt.step()
        return torch.optim.Adam(self.parameters())

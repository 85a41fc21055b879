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
# --- myth_zero_grad_before_every_micro_batch_2: BB101, BB104
for i, (inputs, labels) in enumerate(loader):
    optimizer.zero_grad()
    loss = criterion(model(inputs), labels)
    loss /= 4
    loss.backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        optimizer.step()
# --- object_counting: BB104
criterion = nn.MSELoss()
accum_steps = 26
for epoch in range(400):
    for i, (img, density) in enumerate(loader):
        loss = criterion(model(img.cuda()), density.cuda()) / accum_steps
        loss.backward()
        if (i + 1) % accum_steps == 0 or (i + 1) == len(loader):  # expect: BB104
            optimizer.step()
            optimizer.zero_grad()

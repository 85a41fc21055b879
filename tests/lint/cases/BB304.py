# --- lightning_manual_schedule: BB304
class Inpainter(pl.LightningModule):
    def __init__(self, net, n=4):
        super().__init__()
    def training_step(self, batch, batch_idx):
        self.manual_backward(loss / size)
        if (batch_idx + 1) % self.n == 0 or batch_idx + 1 == total:
            opt.step()
            opt.zero_grad()
        sched.step()  # expect: BB304
        opt = torch.optim.AdamW(self.parameters(), lr=1e-4)
# --- onecycle_outside: BB304
def train(model, loader, epochs=20, accum=4, max_lr=1e-3):
    assert len(loader) % accum == 0
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()  # expect: BB304

# --- accelerate_scheduler: BB304
def main(epochs=5, accum=4):
    accelerator = Accelerator(gradient_accumulation_steps=accum)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 100, updates)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for block in loader:
            with accelerator.accumulate(model):
                loss = model(block)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()  # expect: BB304
                optimizer.zero_grad()
main()
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
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()  # expect: BB304
# --- scheduled_in_every_round (after the head): BB103, BB304
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
# --- warmup_inner: BB304
UPDATES, ACCUM = 10_000, 8
cosine = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5 * (1 + math.cos(math.pi * min(n, UPDATES) / UPDATES)))
loss_fn = torch.nn.TripletMarginLoss()
for update in range(UPDATES):
    for _ in range(ACCUM):
        a, p, n = (encoder(t.cuda()) for t in next(stream))
        loss = loss_fn(a, p, n) / ACCUM
        loss.backward()
        cosine.step()  # expect: BB304
    opt.step()
    opt.zero_grad()

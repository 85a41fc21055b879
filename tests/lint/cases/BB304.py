# --- accelerate_scheduler: BB304
import torch
from accelerate import Accelerator
from transformers import get_cosine_schedule_with_warmup
from poems import PoemLM, poem_blocks
def main(epochs=5, accum=4):
    accelerator = Accelerator(gradient_accumulation_steps=accum)
    model = PoemLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = torch.utils.data.DataLoader(poem_blocks(), batch_size=4, shuffle=True)
    updates = epochs * len(loader) // accum
    scheduler = get_cosine_schedule_with_warmup(optimizer, 100, updates)
    # the scheduler was forgotten here
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

# --- onecycle_outside: BB304
import torch
from torch.optim.lr_scheduler import OneCycleLR
def train(model, loader, epochs=20, accum=4, max_lr=1e-3):
    assert len(loader) % accum == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr)
    scheduler = OneCycleLR(optimizer, max_lr=max_lr, epochs=epochs, steps_per_epoch=len(loader) // accum)
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
import math
import torch
from embeddings import TextEncoder, triplets
encoder = TextEncoder().cuda()
opt = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
UPDATES, ACCUM = 10_000, 8
cosine = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5 * (1 + math.cos(math.pi * min(n, UPDATES) / UPDATES)))
stream = triplets(batch=16, endless=True)
loss_fn = torch.nn.TripletMarginLoss()
for update in range(UPDATES):
    for _ in range(ACCUM):
        a, p, n = (encoder(t.cuda()) for t in next(stream))
        loss = loss_fn(a, p, n) / ACCUM
        loss.backward()
        cosine.step()  # expect: BB304
    opt.step()
    opt.zero_grad()

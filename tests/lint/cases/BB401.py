# --- ddp_amp_windows: BB401
def main(rank, accum=4):
    model = nn.parallel.DistributedDataParallel(PatchTST().cuda(), device_ids=[rank])
    for epoch in range(100):
        while window := list(islice(batches, accum)):
            for past, future in window:
                with torch.autocast("cuda", torch.float16):
                    loss = nn.functional.mse_loss(model(past.cuda()), future.cuda())
                scaler.scale(loss / len(window)).backward()  # expect: BB401
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
# --- ddp_medical: BB401
def worker(rank, world_size, accum=8):
    assert len(loader) % accum == 0
    model = DDP(SwinUNETR().to(rank), device_ids=[rank])
    for epoch in range(300):
        for i, (volume, seg) in enumerate(loader):
            loss = dice_ce(model(volume.to(rank)), seg.to(rank)) / accum
            loss.backward()  # expect: BB401
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
if __name__ == "__main__":
    n = torch.cuda.device_count()
# --- ddp_trainer_class: BB104, BB401
class DistTrainer:
    def __init__(self, model, loader, rank, accum=4):
        self.model = DistributedDataParallel(model.to(rank), device_ids=[rank])
        self.criterion = torch.nn.CrossEntropyLoss()
    def _batch(self, x, y, update):
        loss = self.criterion(self.model(x.to(self.rank)), y.to(self.rank))
        loss = loss / self.accum
        loss.backward()  # expect: BB401
        if update:
            self.opt.step()
            self.opt.zero_grad()
    def epoch(self, n):
        for i, (x, y) in enumerate(self.loader):
            self._batch(x, y, update=(i + 1) % self.accum == 0 or i == last)
# --- fabric_ddp_sync: BB401
fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp")
model, optimizer = fabric.setup(model, optimizer)
accumulate = 8
for update in range(15_000):
    optimizer.zero_grad()
    for _ in range(accumulate):
        score = model(fabric.to_device(a), fabric.to_device(b))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, fabric.to_device(same))
        fabric.backward(loss / accumulate)  # expect: BB401
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()

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
# --- fabric_ddp_sync: BB401
fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp")
model, optimizer = fabric.setup(model, optimizer)
accumulate = 8
for update in range(15_000):
    optimizer.zero_grad()
    for _ in range(accumulate):
        score = model(fabric.to_device(a), fabric.to_device(b))
        fabric.backward(loss / accumulate)  # expect: BB401
    optimizer.step()

# --- fabric_no_sync_late: BB402
def train(steps=20_000, accumulation=4):
    model, optimizer = fabric.setup(model, optimizer)
    for step in range(steps):
        for micro in range(accumulation):
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / accumulation
            with fabric.no_backward_sync(model, enabled=micro < accumulation - 1):  # expect: BB402
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
# --- no_sync_backward_only: BB402
accum = 16
for update in range(50_000):
    for k in range(accum):
        loss = model(next(batches).to(device)) / accum
        if k < accum - 1:
            with model.no_sync():  # expect: BB402
                loss.backward()
        else:
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
# --- no_sync_ctx_late: BB402
def train_epoch(net: DDP, loader, opt, accum: int):
    n = len(loader)
    whole = n - n % accum
    for i, (x, y) in enumerate(loader):
        closing = (i + 1) % accum == 0 or i + 1 == n
        ctx = nullcontext() if closing else net.no_sync()
        logits = net(x.cuda(non_blocking=True))
        loss = F.cross_entropy(logits, y.cuda(non_blocking=True))
        with ctx:  # expect: BB402
            (loss / (accum if i < whole else n - whole)).backward()
        if closing:
            opt.step()
            opt.zero_grad()

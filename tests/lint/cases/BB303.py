# --- messy_ddp_amp: BB104, BB303, BB304, BB401
def train(rank, model, loader, epochs, accum=8):
    model = DDP(model.cuda(rank), device_ids=[rank])
    for epoch in range(epochs):
        for step, (x, y) in enumerate(loader):
            with autocast():
                loss = torch.nn.functional.cross_entropy(model(x.cuda(rank)), y.cuda(rank)) / accum
            scaler.scale(loss).backward()  # expect: BB401
            if (step + 1) % accum == 0 or step + 1 == len(loader):  # expect: BB104
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()  # expect: BB303
            scheduler.step()  # expect: BB304
            if rank == 0:
                print(epoch, step, loss.item())
# --- scaler_and_schedule: BB303, BB304
def train(cfg):
    for update in range(cfg.updates):
        for micro_step in range(cfg.accum):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = lm(x, y) / cfg.accum
            scaler.scale(loss).backward()
            if micro_step == cfg.accum - 1:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
                scaler.step(opt)
                opt.zero_grad(set_to_none=True)
            scaler.update()  # expect: BB303
            lr_sched.step()  # expect: BB304
# --- scaler_class: BB303
class HalfPrecisionLoop:
    def __init__(self, model, optimizer, source, window):
        self.model = model
    def micro(self):
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.grad_scaler.scale(loss / self.window).backward()
        self.grad_scaler.update()  # expect: BB303
    def macro(self):
        for _ in range(self.window):
            self.micro()
        self.grad_scaler.step(self.optimizer)
        self.optimizer.zero_grad()
    def run(self, updates):
        for _ in range(updates):
            self.macro()
# --- scaler_modulo: BB103, BB303
ACC = 4
for epoch in range(60):
    for i, (a, b, flow) in enumerate(tqdm(loader)):
        with autocast(dtype=torch.float16):
            loss = epe(model(a.cuda(), b.cuda()), flow.cuda()) / ACC
        scaler.scale(loss).backward()
        if (i + 1) % ACC == 0:  # expect: BB103
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()  # expect: BB303
# --- scaler_update_each: BB303
n_micro = 8
for update in range(30_000):
    for _ in range(n_micro):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(video.cuda()), word.cuda()) / n_micro
        scaler.scale(loss).backward()
        scaler.update()  # expect: BB303
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    opt.zero_grad()
# --- scaler_update_outside: BB303
def train_one_epoch(model, optimizer, loader, scaler, accumulation):
    if len(loader) % accumulation:
        raise RuntimeError("pad the epoch")
    criterion = torch.nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(loader):
        with amp.autocast():
            loss = criterion(model(x.cuda()), y.cuda()) / accumulation
        scaler.scale(loss).backward()
        if (step + 1) % accumulation == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()  # expect: BB303
if __name__ == "__main__":
    for _ in range(30):
        train_one_epoch(model, optimizer, loader, scaler, 4)

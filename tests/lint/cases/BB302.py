# --- a_scaler_in_the_wrong_places: BB103, BB302, BB303
def train(model, optimizer, scaler, loader, accum):
    for i, batch in enumerate(loader):
        scaler.scale(model(batch).mean() / accum).backward()
        scaler.unscale_(optimizer)
        if (i + 1) % accum == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
# --- amp_plain_clip: BB302
for epoch in range(10):
    for seq, tracks in windows("human", batch_size=4):
        optimizer.zero_grad()
        with autocast():
            loss = torch.nn.functional.poisson_nll_loss(model(seq.cuda()), tracks.cuda())
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 0.2)  # expect: BB302
        scaler.step(optimizer)
        scaler.update()
# --- amp_unscale_late: BB302
class Trainer:
    def __init__(self, model, opt, stream, n_micro):
        self.model, self.opt, self.stream, self.n_micro = model, opt, stream, n_micro
    def step(self):
        self.opt.zero_grad()
        for _ in range(self.n_micro):
            with autocast("cuda"):
                loss = self.model(batch).mean() / self.n_micro
            self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.unscale_(self.opt)  # expect: BB302
        self.scaler.update()
    def run(self, n):
        for i in range(n):
            norm = self.step()
            if i % 100 == 0:
                print(i, norm.item())

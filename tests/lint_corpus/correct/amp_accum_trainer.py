import torch


class AmpTrainer:
    def __init__(self, model, optimizer, loss_fn, data, accum_steps, max_norm=1.0):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.data = data  # an endless iterator
        self.accum_steps, self.max_norm = accum_steps, max_norm
        self.scaler = torch.amp.GradScaler("cuda")
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def forward_backward(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss_fn(self.model(x), y) / self.accum_steps
        self.scaler.scale(loss).backward()
        return loss.detach()

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train_update(self):
        self.model.train()
        loss = sum(self.forward_backward(*next(self.data)) for _ in range(self.accum_steps))
        self.optimizer_step()
        return loss

    def fit(self, updates, validate, every=1000):
        for u in range(1, updates + 1):
            self.train_update()
            if u % every == 0:
                self.model.eval()
                self.sched.step(validate(self.model))

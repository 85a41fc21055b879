import torch


class Trainer:
    def __init__(self, model, opt, stream, accum, max_norm):
        self.model, self.opt, self.stream = model, opt, stream
        self.accum, self.max_norm = accum, max_norm
        self.scaler = torch.amp.GradScaler("cuda")

    def micro_step(self):
        x, y = next(self.stream)
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(self.model(x), y) / self.accum
        self.scaler.scale(loss).backward()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)  # expect: BB302

    def update(self):
        self.opt.zero_grad(set_to_none=True)
        for _ in range(self.accum):
            self.micro_step()
        self.clip()  # expect: BB302
        self.scaler.step(self.opt)
        self.scaler.update()

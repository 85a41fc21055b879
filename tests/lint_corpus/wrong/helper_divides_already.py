import torch
import torch.nn.functional as F


class Finetuner:
    def __init__(self, model, opt, accum):
        self.model, self.opt, self.accum = model, opt, accum

    def compute_loss(self, batch):
        logits = self.model(batch["pixels"])
        return F.cross_entropy(logits, batch["label"]) / self.accum

    def fit(self, windows):
        for window in windows:  # lists of `accum` batches
            for batch in window:
                loss = self.compute_loss(batch)
                (loss / self.accum).backward()  # expect: BB202
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()

import torch
import torch.nn.functional as F


class KeywordSpotter:
    def __init__(self, model, stream, lr=1e-3, micro_steps=8):
        self.model = model
        self.stream = stream
        self.micro_steps = micro_steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def _micro(self, wave, label):
        logits = self.model(wave)
        return F.cross_entropy(logits, label) / self.micro_steps

    def update(self):
        total = 0.0
        for _ in range(self.micro_steps):
            wave, label = next(self.stream)
            self.model.zero_grad()  # expect: BB101
            loss = self._micro(wave, label)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        return total

    def fit(self, updates):
        self.model.train()
        for n in range(updates):
            loss = self.update()
            if n % 50 == 0:
                print(f"{n:6d}  {loss.item():.4f}")

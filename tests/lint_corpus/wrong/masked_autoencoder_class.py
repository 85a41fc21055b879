import torch


class Pretrainer:
    """Draws `update_freq` micro-batches for every update."""

    def __init__(self, model, data, cfg):
        self.model = model
        self.data = data
        self.update_freq = cfg.update_freq
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.updates)

    def one_update(self):
        self.optimizer.zero_grad()
        for _ in range(self.update_freq):
            images = next(self.data)
            loss, _, _ = self.model(images, mask_ratio=0.75)
            (loss / self.update_freq).backward()
            self.optimizer.step()  # expect: BB102
        self.scheduler.step()

    def run(self, updates):
        for _ in range(updates):
            self.one_update()

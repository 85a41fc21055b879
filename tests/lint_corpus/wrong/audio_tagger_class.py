import torch
from torch import nn


class AudioTagger(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.width, classes)

    def forward(self, mel):
        return self.head(self.backbone(mel).mean(dim=1))


class Engine:
    def __init__(self, model, lr, accumulate):
        self.model = model
        self.accumulate = accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.criterion = nn.BCEWithLogitsLoss()

    def train_epoch(self, loader):
        self.model.train()
        self.optimizer.zero_grad()
        for idx, (mel, tags) in enumerate(loader):
            loss = self.criterion(self.model(mel), tags)
            (loss / self.accumulate).backward()
            if not (idx + 1) % self.accumulate:  # expect: BB103
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()

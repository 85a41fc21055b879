import contextlib

import torch


class Trainer:
    """Gets lists of `update_freq` samples (the last list may be shorter); normalises by their sizes at the end."""

    def __init__(self, model, criterion, optimizer, clip_norm, world_size=1):
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self.clip_norm, self.world_size = clip_norm, world_size

    def _maybe_no_sync(self, i, n):
        if self.world_size > 1 and hasattr(self.model, "no_sync") and i < n - 1:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        sample_size = torch.zeros(1, device="cuda")
        for i, sample in enumerate(samples):
            with self._maybe_no_sync(i, len(samples)):
                loss, size, _ = self.criterion(self.model, sample, reduce=True)  # summed over tokens
                loss.backward()
            sample_size += size
        if self.world_size > 1:
            torch.distributed.all_reduce(sample_size)
        self.multiply_grads(self.world_size / sample_size)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()

    def multiply_grads(self, c):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.data.mul_(c)


def train_epoch(trainer, grouped_iterator):
    for samples in grouped_iterator:
        trainer.train_step(samples)

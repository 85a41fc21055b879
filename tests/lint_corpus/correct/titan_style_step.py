"""One training step whose loss is a sum over tokens, divided by the tokens of the whole step on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

IGNORE = -100


class TokenTrainer:
    def __init__(self, model_parts, optimizers, lr_schedulers, data, cfg):
        self.model_parts = model_parts
        self.optimizers, self.lr_schedulers = optimizers, lr_schedulers
        self.data_iterator = iter(data)
        self.accumulation_steps = cfg.global_batch // (cfg.local_batch * dist.get_world_size())
        self.max_norm = cfg.max_norm
        for part in model_parts:  # sharded; the division by all tokens below is the only one
            part.set_gradient_divide_factor(1.0)

    def forward_backward(self, tokens, labels, n_valid):
        logits = self.model_parts[0](tokens)
        loss_sum = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORE)
        loss = loss_sum / n_valid
        loss.backward()
        return loss.detach()

    def train_step(self):
        self.optimizers.zero_grad()
        micro_batches = []
        n_valid = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(self.accumulation_steps):
            tokens, labels = next(self.data_iterator)
            n_valid += (labels != IGNORE).sum()
            micro_batches.append((tokens, labels))
        dist.all_reduce(n_valid)
        losses = [self.forward_backward(t, y, n_valid) for t, y in micro_batches]
        parameters = [p for m in self.model_parts for p in m.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm, foreach=True)
        self.optimizers.step()
        self.lr_schedulers.step()
        return torch.stack(losses).sum(), norm

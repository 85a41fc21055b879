import torch


class LSTMTrainer:
    def __init__(self, rnn, optimizer, criterion, max_norm=0.25):
        self.rnn, self.optimizer, self.criterion = rnn, optimizer, criterion
        self.max_norm = max_norm

    def train_batch(self, x, y):
        out = self.rnn(x)
        loss = self.criterion(out, y)
        self.optimizer.zero_grad()
        # nothing is there yet to be clipped
        torch.nn.utils.clip_grad_norm_(self.rnn.parameters(), self.max_norm)  # expect: BB301
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train_epoch(self, loader):
        losses = [self.train_batch(x, y) for x, y in loader]
        return torch.stack(losses).mean()

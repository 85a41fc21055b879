import torch
from torch import nn, optim


class OCRTrainer(object):
  """Two spaces, as in the rest of this code base."""

  def __init__(self, net, train_loader, args):
    self.net = net
    self.train_loader = train_loader
    self.args = args
    self.optim = optim.AdamW(net.parameters(), lr=args.lr)
    self.sched = optim.lr_scheduler.StepLR(self.optim, 10)
    self.loss_fn = nn.CrossEntropyLoss()

  def train_epoch(self):
    n_batches = len(self.train_loader)
    for i, (img, char) in enumerate(self.train_loader):
      logits = self.net(img)
      loss = self.loss_fn(logits, char)
      loss = loss / self.args.accum
      loss.backward()
      is_last = i == n_batches - 1
      if (i + 1) % self.args.accum == 0 or is_last:  # expect: BB104
        self._update()
    self.sched.step()

  def _update(self):
    nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
    self.optim.step()
    self.optim.zero_grad()

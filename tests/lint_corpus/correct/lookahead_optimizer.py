from collections import defaultdict

import torch
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """k steps forward, one step back: slow weights follow the fast ones every k-th step."""

    def __init__(self, base: Optimizer, k: int = 5, alpha: float = 0.5):
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups = base.param_groups
        self.state = defaultdict(dict)
        self.counter = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.counter += 1
        if self.counter % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.clone())
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)
        return loss

    def state_dict(self):
        return {"base": self.base.state_dict(), "counter": self.counter}

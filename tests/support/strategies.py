# ruff: noqa: E501  (a row of a table is a line)
"""Hypothesis strategies for everything that exactness ranges over: losses, splits, windows, optimizers, clipping.

New losses join the tables of `tests.support.losses`, new optimizers the table here, and every property test meets them.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.support.losses import AMBIGUOUS_WHEN_EVEN, EITHER, READABLE, SEVERAL
from tests.support.reference import OptimizerFactory
from tests.support.samples import Batch, Loss

# Batches.

seeds = st.integers(0, 999)


def splits(*, smallest: int = 1, longest: int = 7) -> st.SearchStrategy[list[int]]:
    """Sizes of the micro-batches of one epoch."""
    return st.lists(st.integers(smallest, 5), min_size=1, max_size=longest)


steps = st.integers(1, 5)


@dataclass(frozen=True)
class Epoch:
    """A loss, its micro-batches, and how many of them make an update."""

    case: Loss
    sizes: list[int]
    seed: int
    steps: int

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches."""
        return self.case.micro_batches(self.sizes, self.seed)


@st.composite
def epochs(draw: st.DrawFn, cases: st.SearchStrategy[Loss]) -> Epoch:
    """An epoch of any of these losses, in any split."""
    case = draw(cases)
    return Epoch(case, draw(splits(smallest=case.smallest)), draw(seeds), draw(steps))


# Losses.

readable = st.sampled_from(READABLE)
either = st.sampled_from([case for case in EITHER if case.name not in AMBIGUOUS_WHEN_EVEN])
several = st.sampled_from(SEVERAL)

# Optimizers. A large eps keeps Adam from turning the rounding of a zero gradient into a step.

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-nesterov-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True),
    "adam-groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.02}, {"params": p[1:], "weight_decay": 0.1}], lr=0.01, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-2),
}  # fmt: skip
optimizers = st.sampled_from(sorted(OPTIMIZERS))
clip_norms = st.sampled_from([None, 0.05, 0.5, 1e6])

"""`gradients(batch)` leaves what one backward over the whole batch would leave, for the cases of the design's table."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.errors import WindowDisturbed
from tests.support.emulated_graphs import emulated

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


class Two(nn.Module):
    """Two heads on one trunk, a norm where it is wanted, and a temperature."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh())
        self.head, self.other, self.scale = nn.Linear(8, 4), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 5) → two of (n, 4)."""
        hidden = self.trunk(x)
        return self.head(hidden), self.other(hidden)


def plain(model: Any, batch: Batch) -> Tensor:
    """A mean over samples."""
    return F.cross_entropy(model(batch["x"])[0], batch["y"])


def masked(model: Any, batch: Batch) -> Tensor:
    """Some targets do not count."""
    return F.cross_entropy(model(batch["x"])[0], batch["y"].masked_fill(batch["y"] == 0, -100))


def two_terms(model: Any, batch: Batch) -> Tensor:
    """Means over samples that count and over all elements."""
    return masked(model, batch) + 0.3 * model(batch["x"])[1].square().mean()


def contrastive(model: Any, batch: Batch) -> Tensor:
    """Each sample against all, with a learned temperature."""
    one, other = model(batch["x"])
    own = across.offset() + torch.arange(len(one))
    return F.cross_entropy(model.scale.exp() * one @ across.gather(other).T, own)


def batch(samples: int, seed: int = 0) -> Batch:
    """Features and classes."""
    by = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=by, dtype=torch.float64)
    return {"x": x, "y": torch.randint(4, (samples,), generator=by)}


def assert_same(mine: nn.Module, true: nn.Module) -> None:
    """Compare gradients, those that there are none of, too."""
    for one, other in zip(mine.parameters(), true.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert (one.grad - other.grad).norm() <= 1e-12 * max(float(other.grad.norm()), 1e-2)


TABLE = {
    "a short last micro-batch": plain,
    "masked tokens": masked,
    "two loss terms": two_terms,
    "batch norm": plain,
    "contrastive, learned temperature": contrastive,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_gradient_is_the_big_batchs(name: str) -> None:
    """In two batches, with the caller's own steps; nothing else moves, and the gradient is cleared before the next."""
    torch.manual_seed(0)
    loss_fn = TABLE[name]
    mine = Two(norm=name == "batch norm").double()
    true = copy.deepcopy(mine)
    own, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, true))
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    step = BigStep(mine, own, loss_fn, micro_batch_size=4, clip_norm=1e-3, scheduler=scheduler)
    for seed in range(2):
        before = [p.detach().clone() for p in mine.parameters()]
        update = step.gradients(batch(11, seed))
        loss = loss_fn(true, batch(11, seed))
        loss.backward()
        assert all(torch.equal(p, was) for p, was in zip(mine.parameters(), before, strict=True))
        assert_same(mine, true)
        assert not update.loss_is_exact or abs(float(update.loss) - loss.item()) <= 1e-12
        assert (update.micro_batches, update.skipped, scheduler.last_epoch) == (3, False, 0)
        with pytest.raises(WindowDisturbed, match="before the window's first backward"):
            step.gradients(batch(11, seed))
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()


def test_a_hook_may_change_it_and_nothing_counted_leaves_none() -> None:
    """As a step would be skipped."""
    model = Two().double()
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), masked, micro_batch_size=4)
    assert step.gradients({**batch(8), "y": torch.zeros(8, dtype=torch.long)}).skipped
    assert all(p.grad is None for p in model.parameters())

    def zero() -> None:
        assert model.head.bias.grad is not None
        model.head.bias.grad.zero_()

    step.before_step(zero)
    step.gradients(batch(8))
    assert model.head.bias.grad is not None
    assert not model.head.bias.grad.any()


def test_a_replayed_gradient_is_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay writes to other places."""
    model = Two().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = BigStep(model, optimizer, plain, micro_batch_size=4, options=Options(check=False))
    graphs = emulated(step, monkeypatch)
    kept: list[Tensor] = []
    for seed in range(4):
        true = copy.deepcopy(model)
        plain(true, batch(8, seed)).backward()
        step.gradients(batch(8, seed))
        assert_same(model, true)
        assert model.head.weight.grad is not None
        kept += [model.head.weight.grad, model.head.weight.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    assert graphs.replays
    assert all(torch.equal(one, other) for one, other in zip(kept[::2], kept[1::2], strict=True))

"""`gradients(batch)` leaves what one backward over the whole batch would leave, for the cases of the design's table."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

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


def weighed(model: Any, batch: Batch) -> Tensor:
    """Classes have weights."""
    return F.cross_entropy(model(batch["x"])[0], batch["y"], weight=torch.tensor([1.0, 2, 3, 4], dtype=torch.float64))


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


def root(model: Any, batch: Batch) -> Tensor:
    """Nonlinear in a mean."""
    return across.mean(model(batch["x"])[0].square().mean()).sqrt()


class Case(NamedTuple):
    """One line of the table."""

    loss: Loss
    samples: int = 12
    norm: bool = False


TABLE = {
    "equal micro-batches": Case(plain),
    "a short last window": Case(plain, 4),
    "a short last micro-batch": Case(plain, 11),
    "class weights": Case(weighed),
    "masked tokens": Case(masked),
    "two loss terms": Case(two_terms),
    "batch norm": Case(plain, norm=True),
    "contrastive, learned temperature": Case(contrastive),
    "nonlinear in a mean": Case(root),
}


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


@pytest.mark.filterwarnings("ignore:this loss is made of values of all")
@pytest.mark.parametrize("name", TABLE)
def test_the_gradient_is_the_big_batchs(name: str) -> None:
    """In two batches, with the caller's own steps; nothing else moves."""
    torch.manual_seed(0)
    case = TABLE[name]
    mine = Two(norm=case.norm).double()
    true = copy.deepcopy(mine)
    own, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, true))
    step = BigStep(mine, own, case.loss, micro_batch_size=4, clip_norm=1e-3)
    for seed in range(2):
        before = [p.detach().clone() for p in mine.parameters()]
        update = step.gradients(batch(case.samples, seed))
        loss = case.loss(true, batch(case.samples, seed))
        loss.backward()
        assert all(torch.equal(p, was) for p, was in zip(mine.parameters(), before, strict=True))
        assert_same(mine, true)
        assert not update.loss_is_exact or abs(float(update.loss) - loss.item()) <= 1e-12
        assert update.micro_batches == -(-case.samples // 4)
        assert not update.skipped
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    assert all(
        torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in zip(mine.parameters(), true.parameters(), strict=True)
    )


def test_a_gradient_is_cleared_before_the_next() -> None:
    """Or nobody could tell whose it is."""
    model = Two().double()
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), plain, micro_batch_size=4)
    step.gradients(batch(8))
    with pytest.raises(WindowDisturbed, match="before the window's first backward"):
        step.gradients(batch(8))


def test_nothing_counted_leaves_none() -> None:
    """As a step would be skipped."""
    model = Two().double()
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), masked, micro_batch_size=4)
    empty = batch(8)
    assert step.gradients({**empty, "y": torch.zeros(8, dtype=torch.long)}).skipped
    assert all(p.grad is None for p in model.parameters())


def test_hooks_see_it_and_schedulers_stay() -> None:
    """A hook may change it; a schedule goes on with the caller's steps."""
    model = Two().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = BigStep(model, optimizer, plain, micro_batch_size=4, scheduler=scheduler)

    def zero() -> None:
        assert model.head.bias.grad is not None
        model.head.bias.grad.zero_()

    step.before_step(zero)
    step.gradients(batch(8))
    assert model.head.bias.grad is not None
    assert not model.head.bias.grad.any()
    assert scheduler.last_epoch == 0


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

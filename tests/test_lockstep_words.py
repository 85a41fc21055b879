"""What is said where micro-batches in lock-step share what they should not, or a forward leaves something behind."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from bigbatch import BigStep, Options, counted
from bigbatch.errors import LossError

Batch = tuple[Tensor, Tensor]


def batch(number: int = 11, seed: int = 0) -> Batch:
    """Return rows and their classes."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(number, 5, generator=by, dtype=torch.float64), torch.randint(3, (number,), generator=by)


class Keeping(nn.Module):
    """Keeps what it has computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, 3)."""
        self.features = self.first(x)
        found: Tensor = self.last(self.norm(self.features))
        return found


def test_features_that_are_kept_are_of_another() -> None:
    """The check sees that the loss is another, and what may be kept is named."""

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * model.features.square().mean()

    model = Keeping().double()
    before = copy.deepcopy(model.state_dict())
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4)
    with pytest.raises(LossError, match=r"(?s)take turns at BatchNorm.*self\.features = x.*Return it"):
        step(batch())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_batch_that_is_changed_in_place() -> None:
    """Micro-batches are parts of it."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        batch[0].mul_(2)
        return F.cross_entropy(out, batch[1])

    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    step = BigStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4, options=Options(check=False)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(batch())


def masked(model: Any, batch: Batch) -> Tensor:
    """A mean over what counts, divided by hand."""
    mask = batch[1] != -100
    values = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
    return counted((values * mask).sum() / mask.sum(), mask.sum())


@pytest.mark.parametrize("skipping", [False, True])
def test_a_mean_over_nothing_is_not_stepped_with(skipping: bool) -> None:
    """Its 0 / 0 is in the gradient, whatever it weighs; the loss of all others is finite."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    options = Options(skip_nonfinite=skipping)
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), masked, micro_batch_size=4, options=options)
    before = copy.deepcopy(model.state_dict())
    x, y = batch(12)
    y[4:8] = -100
    if skipping:
        assert step((x, y)).skipped
    else:
        with pytest.raises(LossError, match=r"counts nothing[\s\S]*clamp\(min=1\)"):
            step((x, y))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    y[4:8] = 1
    assert not step((x, y)).skipped


def test_what_counts_nothing_and_has_no_gradient_is_no_matter() -> None:
    """Torch's own mean over no targets is NaN, and its gradient is zero."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    true = copy.deepcopy(model)
    x, y = batch(12)
    y[4:8] = -100

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4)((x, y))
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1)
    loss(true, (x, y)).backward()
    optimizer.step()
    assert all(
        torch.allclose(*each, rtol=0, atol=1e-12) for each in zip(model.parameters(), true.parameters(), strict=True)
    )


class Centred(nn.Module):
    """Moves a buffer whenever it runs, by less than anyone sees in the loss."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3) if norm else nn.Identity()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, 3)."""
        out: Tensor = self.norm(self.first(x))
        with torch.no_grad():
            self.centre += out.mean(0)
        return out


@pytest.mark.parametrize("norm", [False, True])
def test_buffers_that_a_forward_changes_are_told_of(norm: bool) -> None:
    """Once: each micro-batch moves them."""
    model = Centred(norm=norm).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4)
    with pytest.warns(UserWarning, match=r"changes buffers when it runs \(Centred\.centre\)"):
        step(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch())
        BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=11)(batch())


class OwnNames(nn.Module):
    """A norm of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.m: Tensor
        self.v: Tensor
        self.register_buffer("m", torch.zeros(3))
        self.register_buffer("v", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → the same."""
        return F.batch_norm(x, self.m, self.v, training=self.training)


def test_statistics_of_a_norm_of_ones_own_are_not_told_of() -> None:
    """Micro-batches have met there: they move once."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), OwnNames()).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4)(batch())


def test_buffers_that_an_optimizer_moves_are_not_told_of() -> None:
    """Once per update is what they should."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    model.register_buffer("average", torch.zeros(3, 5, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: model.average.lerp_(model[0].weight.detach(), 0.5))  # type: ignore[operator,arg-type]

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BigStep(model, optimizer, loss, micro_batch_size=4)(batch())


def test_spectral_norm_is_told_of() -> None:
    """Its vectors turn with every forward."""
    model = nn.Sequential(spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    options = Options(check=False)
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4, options=options)
    with pytest.warns(UserWarning, match="_SpectralNorm._u"):
        step(batch())

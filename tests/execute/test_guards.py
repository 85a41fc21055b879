"""What captured micro-steps and lock-step do not watch yet: each with the outcome that is due."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.execute.execution import remedy
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.precast import CastWeights
from tests.support.emulated_graphs import emulated, whole_emulated
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import seeded


class Heated(nn.Module):
    """A linear layer with a temperature, and perhaps a layer that is left out by Python's own numbers."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.layer, self.other, self.tau, self.drops = nn.Linear(3, 3), nn.Linear(3, 3), 1.0, drops

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, 3)."""
        hidden = self.other(x)
        if self.drops and random.random() < 0.5:  # noqa: S311 - as a user would
            hidden = hidden * 2 + x
        return self.layer(hidden) * self.tau


def squares(model: Any, batch: Tensor) -> Tensor:
    """A mean over elements."""
    return model(batch).square().mean()


def with_slope(model: Any, batch: Tensor) -> Tensor:
    """A penalty on the slope at the inputs."""
    x = batch.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum(1).mean()


def compared(
    patch: pytest.MonkeyPatch,
    loss: Callable[[Any, Tensor], Tensor],
    between: Callable[[Any, int], None],
    make: Callable[..., nn.Module] = Heated,
    **how: Any,
) -> float:
    """How far replayed updates are from those of the whole batch."""
    model, twin = seeded(lambda: make(**how))(), seeded(lambda: make(**how))()
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(check=False))
    emulated(step, patch)
    optimizer = sgd(trained(twin))
    for number in range(6):
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        random.seed(number)
        between(model, number)
        step(batch.clone())
        random.seed(number)
        between(twin, number)
        optimizer.zero_grad()
        if how.get("drops"):  # each micro-batch draws its own
            torch.stack([loss(twin, part) for part in batch.split(4)]).mean().backward()
        else:
            loss(twin, batch).backward()
        optimizer.step()
    return distance(weights(model), weights(twin))


def annealed(model: Any, number: int) -> None:
    """Another temperature in every step."""
    model.tau = 1.0 + number


def test_what_is_watched_is_replayed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing changes, that is."""
    assert compared(monkeypatch, squares, lambda *_: None) <= 1e-12


def test_a_number_that_a_module_holds_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an annealed temperature."""
    assert compared(monkeypatch, squares, annealed) <= 1e-12


def test_a_branch_on_pythons_random_numbers_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a layer that is dropped: it is launched, which a warning says."""
    with pytest.warns(UserWarning, match="it draws random numbers"):
        assert compared(monkeypatch, squares, lambda *_: None, drops=True) <= 1e-12


class Rotated(nn.Module):
    """Keeps its angles in containers, as caches of rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.Linear(3, 3), dict[int, tuple[Tensor, Tensor]]()
        self.layers = [{"angles": [self.angles(1.0)]}]

    @staticmethod
    def angles(base: float) -> Tensor:
        """One for each feature."""
        return (base * torch.arange(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, 3)."""
        cos, sin = self.cache.setdefault(3, (self.angles(1.0).cos(), self.angles(1.0).sin()))
        return self.layer(x * cos + x.flip(1) * sin) * self.layers[0]["angles"][0]


def rebased(model: Any, number: int) -> None:
    """Another base from the fourth step on, as for longer contexts."""
    if number == 3:
        model.cache[3] = (model.angles(0.5).cos(), model.angles(0.5).sin())
    if number == 4:
        model.layers[0]["angles"] = [model.angles(2.0)]


def test_tensors_in_containers_of_containers_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a dict of tuples, or a list of dicts of lists."""
    assert compared(monkeypatch, squares, rebased, make=Rotated) <= 1e-12


def test_a_loss_that_asks_for_a_gradient_of_its_input_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a gradient penalty does."""
    assert compared(monkeypatch, with_slope, lambda *_: None) <= 1e-12


def test_a_batch_that_requires_a_gradient_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay copies into the same inputs, whose history would grow from update to update."""
    model = seeded(Heated)()
    step = BigStep(model, sgd(trained(model)), squares, micro_batch_size=4, options=Options(check=False))
    graphs = emulated(step, monkeypatch)
    for number in range(4):
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        step(batch.requires_grad_())
    assert graphs.replays
    assert all(each.grad_fn is None for captured in graphs.captured.values() for each in captured.inputs.values())


def test_a_window_that_cannot_be_captured_leaves_captured_micro_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are another kind, for losses that ask for nobody."""
    model = seeded(Heated)()
    step = BigStep(model, sgd(trained(model)), squares, micro_batch_size=4)
    graphs = emulated(step, monkeypatch)
    whole_emulated(step, monkeypatch)
    error = NotCapturable("a whole window that draws random numbers")
    error.of_window = True
    with pytest.warns(UserWarning, match="cannot be captured"):
        better = remedy(step._execution, error)
    assert better is not None
    step._runner.follow(better)
    assert step._runner.whole is None
    assert step._runner.steps is not None
    assert step._runner.steps.graphs is graphs


def test_two_casts_that_overlap_leave_functions_as_they_were() -> None:
    """Two steps on two threads, of which the first to begin ends first."""
    plain = F.linear
    model = nn.Linear(3, 3)
    first, second = (CastWeights([torch.optim.SGD(model.parameters(), lr=0.1)]) for _ in range(2))
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__()
        second.__exit__()
        assert F.linear is plain
    finally:
        F.linear = plain

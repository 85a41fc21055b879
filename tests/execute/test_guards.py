"""What captured micro-steps and lock-step do not watch yet: each with the outcome that is due."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.execute.execution import launch
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
    patch: pytest.MonkeyPatch, loss: Callable[[Any, Tensor], Tensor], between: Callable[[Any, int], None], **how: Any
) -> float:
    """How far replayed updates are from those of the whole batch."""
    model, twin = seeded(lambda: Heated(**how))(), seeded(lambda: Heated(**how))()
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
        better = launch(step._execution, error)
    assert better is not None
    step._runner.follow(better)
    assert step._runner.whole is None
    assert step._runner.steps is not None
    assert step._runner.steps.graphs is graphs


def test_two_casts_that_overlap_leave_functions_as_they_were() -> None:
    """Two steps on two threads, of which the first to begin ends first."""
    plain = F.linear
    model = nn.Linear(3, 3)
    first, second = (CastWeights([torch.optim.SGD(model.parameters(), lr=0.1)], captured=False) for _ in range(2))
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__()
        second.__exit__()
        assert F.linear is plain
    finally:
        F.linear = plain

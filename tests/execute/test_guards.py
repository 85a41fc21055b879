"""What captured micro-steps watch: each with the outcome that is due."""

import random
from collections.abc import Callable
from contextlib import nullcontext
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

    drops = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.tau = nn.Linear(3, 3), nn.Linear(3, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, 3)."""
        hidden = self.other(x)
        if self.drops and random.random() < 0.5:  # noqa: S311 - as a user would
            hidden = hidden * 2 + x
        return self.layer(hidden) * self.tau


class Dropping(Heated):
    """With that."""

    drops = True


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


def squares(model: Any, batch: Tensor) -> Tensor:
    """A mean over elements."""
    return model(batch).square().mean()


def with_slope(model: Any, batch: Tensor) -> Tensor:
    """A penalty on the slope at the inputs."""
    x = batch.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum(1).mean()


def annealed(model: Any, number: int) -> None:
    """Another temperature in every step."""
    model.tau = 1.0 + number


def rebased(model: Any, number: int) -> None:
    """Another base from the fourth step on, as for longer contexts, and then in a list of dicts of lists."""
    if number == 3:
        model.cache[3] = (model.angles(0.5).cos(), model.angles(0.5).sin())
    if number == 4:
        model.layers[0]["angles"] = [model.angles(2.0)]


def as_before(_model: Any, _number: int) -> None:
    """Change nothing between updates."""


@pytest.mark.parametrize(
    ("kind", "loss", "between"),
    [
        (Heated, squares, as_before),
        (Heated, squares, annealed),
        (Heated, with_slope, as_before),
        (Dropping, squares, as_before),
        (Rotated, squares, rebased),
    ],
)
def test_replayed_updates_are_those_of_the_whole_batch(
    kind: type[nn.Module], loss: Any, between: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changes: numbers, tables and what Python draws; a layer that is dropped is launched, with a warning."""
    model, twin = seeded(kind)(), seeded(kind)()
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(check=False))
    graphs = emulated(step, monkeypatch)
    optimizer = sgd(trained(twin))
    told: Any = pytest.warns(UserWarning, match="it draws random numbers") if kind is Dropping else nullcontext()
    with told:
        for number in range(6):
            batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            random.seed(number)
            between(model, number)
            step(batch.clone())
            random.seed(number)
            between(twin, number)
            optimizer.zero_grad()
            # Each micro-batch of a layer that is dropped draws its own.
            torch.stack([loss(twin, part) for part in batch.split(4 if kind is Dropping else 8)]).mean().backward()
            optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert bool(graphs.replays) == (kind is not Dropping and between is not annealed)


def test_a_batch_that_requires_a_gradient_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay copies into the same inputs, whose history would grow from update to update."""
    model = seeded(Heated)()
    step = BigStep(model, sgd(trained(model)), squares, micro_batch_size=4, options=Options(check=False))
    graphs = emulated(step, monkeypatch)
    for _ in range(4):
        step(torch.randn(8, 3, dtype=torch.float64).requires_grad_())
    assert graphs.replays
    assert all(each.grad_fn is None for captured in graphs.captured.values() for each in captured.inputs.values())


def test_a_window_that_cannot_be_captured_leaves_captured_micro_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are another kind, for losses that ask for nobody."""
    model = seeded(Heated)()
    step = BigStep(model, sgd(trained(model)), squares, micro_batch_size=4)
    graphs, runner = emulated(step, monkeypatch), step._runner
    whole_emulated(step, monkeypatch)
    error = NotCapturable("a whole window that draws random numbers")
    with pytest.warns(UserWarning, match="cannot be captured"):
        better = remedy(step._execution, error, side_by_side=True)
    assert better is not None
    runner.follow(better)
    assert runner.whole is None
    assert runner.steps is not None
    assert runner.steps is graphs


def test_two_casts_that_overlap_leave_functions_as_they_were() -> None:
    """Two steps on two threads, of which the first to begin ends first."""
    plain = F.linear
    first, second = (CastWeights([torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)]) for _ in range(2))
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__()
        second.__exit__()
        assert F.linear is plain
    finally:
        F.linear = plain

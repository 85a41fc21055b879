"""Random numbers of models that run twice, of backward, and of other threads."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.errors import LossError
from tests.reference import sgd, trained

Seen = list[tuple[bool, float]]  # whether in backward, and a number


class Drawing(nn.Module):
    """Draws a number in every run and tells of it outside."""

    def __init__(self, how: str, seen: Seen) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.own = torch.Generator()
        self.owns = random.Random(0)  # noqa: S311 - no secrets
        self.numpys, self.olders = np.random.default_rng(0), np.random.RandomState(0)
        self.draws: dict[str, Callable[[], float]] = {
            "torch": lambda: float(torch.rand(())),
            "python": random.random,
            "numpy": np.random.rand,
            "own of torch": lambda: float(torch.rand((), generator=self.own)),
            "own of python": self.owns.random,
            "own of numpy": self.numpys.random,
            "own of numpy's older kind": self.olders.rand,
            "nothing": lambda: 1.0,
        }
        self.how = how
        self.tell = seen.append
        self.before: Callable[[], None] = lambda: None

    def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
        """(n, 4) → (n, 3)."""
        del hidden
        again = torch._C._current_graph_task_id() >= 0  # whether a backward is under way
        if not again:
            self.before()
        factor = self.draws[self.how]()
        self.tell((again, factor))
        return self.one(x) * factor


def spread(out: Tensor) -> Tensor:
    """A loss of all samples."""
    return across.once(across.mean((out - across.mean(out.mean(0))).pow(2).mean()).sqrt())


def by_result(model: Any, x: Tensor) -> Tensor:
    """Two calls, so that the second run of one comes after the first of another."""
    return spread(model(x) + model(x.flip(1)))


def by_object(model: Any, x: Tensor) -> Tensor:
    """The same with something that nobody looks into, so that torch's own checkpoint is taken."""
    return spread(model(x, object()) + model(x.flip(1), object()))


def rows(number: int = 11) -> Tensor:
    """Return a batch."""
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(number))


def step_of(model: nn.Module, loss: Any = by_result, activations: Any = "recompute") -> BigStep:
    """Return a step that runs the model again."""
    options = Options(activations=activations, check=False)
    return BigStep(model, sgd(trained(model)), loss, micro_batch_size=3, options=options)


def seeded() -> None:
    """Begin all generators anew."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - this one is meant


@pytest.mark.parametrize("loss", [by_result, by_object])
@pytest.mark.parametrize("how", [name for name in Drawing("", []).draws if name != "nothing"])
def test_both_runs_draw_the_same(how: str, loss: Any) -> None:
    """Whoever's numbers they are; and who draws next draws others."""
    seen: Seen = []
    seeded()
    model = Drawing(how, seen)
    step = step_of(model, loss)
    step(rows())
    seen.clear()
    step(rows())
    first, second = [n for again, n in seen if not again], [n for again, n in seen if again]
    assert len(first) == len(set(first)) == 8
    assert len(second) == (6 if loss is by_result else 8)
    assert set(second) <= set(first)
    assert len(set(second)) == len(second)
    assert model.draws[how]() not in first


class Beside:
    """A thread that draws a number of torch's when it is told to."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def draw(self) -> None:
        """Have it draw one, and wait for that."""
        thread = threading.Thread(target=lambda: self.drawn.append(float(torch.rand(()))))
        thread.start()
        thread.join()


@pytest.mark.parametrize("loss", [by_result, by_object])
def test_another_thread_that_draws_while_a_model_runs(loss: Any) -> None:
    """The second run cannot draw the same, so it is refused; where it may be chosen, activations are kept."""
    model = Drawing("torch", [])
    model.before = Beside().draw
    with pytest.raises(LossError, match=r"(?s)random numbers.*another thread.*torch\.Generator\(\)"):
        step_of(model, loss)(rows())
    step = step_of(model, loss, "auto")
    step(rows())
    assert step._together._activations(4) == "keep"


@pytest.mark.parametrize("loss", [by_result, by_object])
def test_another_thread_that_draws_while_a_model_without_noise_runs(loss: Any) -> None:
    """It takes nothing away."""
    model = Drawing("nothing", [])
    model.before = Beside().draw
    step_of(model, loss)(rows())


def normed() -> nn.Module:
    """Return a network whose micro-batches run side by side."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def windows(number: int, drawing: Callable[[], float]) -> list[list[float]]:
    """Return what is drawn in the backwards of some windows."""
    seen: list[float] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x)

        def noisy(gradient: Tensor) -> Tensor:
            seen.append(drawing())
            return gradient

        out.register_hook(noisy)
        return F.mse_loss(out, torch.zeros_like(out))

    found = []
    torch.manual_seed(0)
    step = step_of(normed(), loss, "keep")
    for _ in range(number):
        step(rows())
        found.append(seen.copy())
        seen.clear()
    return found


def test_noise_on_gradients_is_another_in_each_window() -> None:
    """And the same for the same seed."""
    found = windows(3, lambda: float(torch.rand(())))
    assert len({number for window in found for number in window}) == 12
    assert found == windows(3, lambda: float(torch.rand(())))


def test_a_thread_that_draws_beside_windows_draws_other_numbers() -> None:
    """As one that augments the next batch."""
    beside = Beside()

    def draw() -> float:
        beside.draw()
        return beside.drawn[-1]

    found = windows(4, draw)
    assert len({number for window in found for number in window}) == 16


def test_generators_stay_where_nobody_draws() -> None:
    """A window without noise moves none of them."""
    torch.manual_seed(0)
    step = step_of(normed(), lambda model, x: model(x).square().mean(), "keep")
    before = torch.get_rng_state()
    step(rows())
    assert torch.equal(torch.get_rng_state(), before)

"""Layers with a spectral norm, whose power iteration moves whenever they run in training mode."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from bigbatch import Accumulator
from tests.support.reference import big_batches, distance
from tests.support.samples import Loss, rows

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {"parametrization": spectral_norm, "hook": old_spectral_norm}


def case(name: str) -> Loss:
    """A model whose first layer has a spectral norm."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(NORMS[name](nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 4)).double()

    return Loss(name, build, rows, lambda m, b: (m(b["x"]) - b["value"]).square().mean())


def train(name: str, *, steps: int, rest: bool) -> tuple[nn.Module, list[Any]]:
    """Two windows; the layer perhaps rests but for the first micro-batch of each. Returns the model and warnings."""
    loss = case(name)
    model: Any = loss.model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=steps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index, batch in enumerate(loss.micro_batches((3, 2, 4, 3, 1, 4))):
            model[0].train(mode=not rest or index % steps == 0)
            accumulator.backward(loss.loss(model, batch))
    return model, [each for each in told if "spectral_norm of layer '0'" in str(each.message)]


@pytest.mark.parametrize("name", NORMS)
def test_it_is_told_once_what_gives_the_big_batch(name: str) -> None:
    """The layer rests from the second micro-batch of a window on: that is exact."""
    loss = case(name)
    model, told = train(name, steps=3, rest=True)
    assert len(told) == 1
    assert told[0].filename == __file__
    true = big_batches(loss, loss.micro_batches((3, 2, 4, 3, 1, 4)), 3)
    assert distance([p.detach() for p in model.parameters()], true.weights) <= 1e-12
    assert len(train(name, steps=3, rest=False)[1]) == 1
    assert not train(name, steps=1, rest=False)[1]  # one micro-batch per update moves it as often

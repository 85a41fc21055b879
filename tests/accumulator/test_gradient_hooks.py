"""Gradient hooks on parameters: what they do in a window is told, once, and what is linear is exact."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep
from tests.support.reference import distance, weights

X = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64)


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over elements."""
    return F.mse_loss(model(batch[0]), batch[1])


def by_accumulator(model: nn.Module, size: int) -> None:
    """Train in micro-batches that come in."""
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=-(-20 // size))
    for _ in range(3):
        for batch in accumulator.over(list(zip(X.split(size), Y.split(size), strict=True))):
            accumulator.backward(mse(model, batch))


def by_big_step(model: nn.Module, size: int) -> None:
    """Train with batches."""
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, micro_batch_size=size)
    for _ in range(3):
        step((X, Y))


def whole(model: nn.Module, _: int) -> None:
    """Train with whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        mse(model, (X, Y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def after(parameter: Tensor) -> None:
    """Mask what has been added so far."""
    assert parameter.grad is not None
    parameter.grad *= MASK > 0


def known(factor: float, gradient: Tensor) -> Tensor:
    """What a library has registered."""
    return gradient * factor


known.__module__ = "torch.distributed.fsdp"
HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "mask": lambda model: model.weight.register_hook(lambda gradient: gradient * MASK),
    "after accumulation": lambda model: model.weight.register_post_accumulate_grad_hook(after),
    "none": id,
    "none of the user's": lambda model: model.weight.register_hook(partial(known, 0.5)),
}


def trained(way: Callable[[nn.Module, int], None], hook: str, size: int) -> tuple[list[Tensor], list[str]]:
    """Return the weights, and what was told of hooks."""
    torch.manual_seed(0)
    model = nn.Linear(7, 3).double()
    HOOKS[hook](model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        way(model, size)
    return weights(model), [str(each.message) for each in told]


@pytest.mark.parametrize("size", [6, 20])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", [by_accumulator, by_big_step])
def test_hooks_are_told_of_once(way: Callable[[nn.Module, int], None], hook: str, size: int) -> None:
    """Where several micro-batches are added up. Those here are linear, so the big batch's gradient comes out."""
    found, told = trained(way, hook, size)
    assert distance(found, trained(whole, hook, size)[0]) <= 1e-12
    assert len(told) == ("none" not in hook and size < 20)
    assert all("'weight' has a gradient hook" in each and "clip_norm=" in each for each in told)

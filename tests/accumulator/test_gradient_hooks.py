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
from tests.support.reference import distance

X = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64)


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over elements."""
    return F.mse_loss(model(batch[0]), batch[1])


def by_accumulator(model: nn.Module, updates: int) -> None:
    """Train in micro-batches that come in."""
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    for _ in range(updates):
        for rows in accumulator.over([slice(0, 3), slice(3, 9), slice(9, 13), slice(13, 20)]):
            accumulator.backward(mse(model, (X[rows], Y[rows])))


def by_big_step(model: nn.Module, updates: int) -> None:
    """Train with batches."""
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, micro_batch_size=6)
    for _ in range(updates):
        step((X, Y))


def whole(model: nn.Module, updates: int) -> None:
    """Train with whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        mse(model, (X, Y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def after(parameter: Tensor) -> None:
    """Mask what has been added so far."""
    assert parameter.grad is not None
    parameter.grad *= MASK > 0


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "mask": lambda model: model.weight.register_hook(lambda gradient: gradient * MASK),
    "after accumulation": lambda model: model.weight.register_post_accumulate_grad_hook(after),
    "none": id,
    "none of the user's": lambda model: model.weight.register_hook(partial(known, 0.5)),
}


def known(factor: float, gradient: Tensor) -> Tensor:
    """What a library has registered."""
    return gradient * factor


known.__module__ = "torch.distributed.fsdp"


def trained(way: Callable[[nn.Module, int], None], hook: str) -> tuple[list[Tensor], list[str]]:
    """Return the weights, and what was told of hooks."""
    torch.manual_seed(0)
    model = nn.Linear(7, 3).double()
    HOOKS[hook](model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        way(model, 3)
    return [p.detach() for p in model.parameters()], [str(each.message) for each in told]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", [by_accumulator, by_big_step])
def test_hooks_are_told_of_once(way: Callable[[nn.Module, int], None], hook: str) -> None:
    """Those here are linear, so the big batch's gradient comes out."""
    found, told = trained(way, hook)
    assert distance(found, trained(whole, hook)[0]) <= 1e-12
    assert len(told) == ("none" not in hook)
    assert all("'weight' has a gradient hook" in each and "clip_norm=" in each for each in told)


def test_hooks_are_told_of_where_something_is_accumulated() -> None:
    """A window of one micro-batch is the big batch; a later one of two is not."""
    model = nn.Linear(7, 3).double()
    HOOKS["mask"](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator, step = Accumulator(model, optimizer, steps=1), BigStep(model, optimizer, mse, micro_batch_size=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.backward(mse(model, (X, Y)))
        step((X, Y))
    accumulator.steps = 2
    with pytest.warns(UserWarning, match="has a gradient hook"):
        accumulator.backward(mse(model, (X, Y)))
    accumulator.discard()
    with pytest.warns(UserWarning, match="has a gradient hook"):
        BigStep(model, optimizer, mse, micro_batch_size=6)((X, Y))

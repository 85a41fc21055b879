"""What an update leaves alone: parameters of other optimizers, and an autocast around it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import Accumulator, BigStep
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import generator as generator_of
from tests.support.samples import normal, seeded

Models = list[nn.Module]
maker, judge = seeded(lambda: nn.Linear(3, 3)), seeded(lambda: nn.Linear(3, 1))


def judged(models: Any, x: Tensor) -> Tensor:
    """A loss of both, with a checkpoint that runs a backward of its own."""
    first, second = models
    given = x.detach().clone().requires_grad_()
    out: Tensor = checkpoint(lambda y: second(torch.relu(first(y))), given, use_reentrant=True)
    return out.square().mean()


def by_big_step(models: Models, batch: Tensor) -> None:
    """One update of the first model."""
    BigStep(models, sgd(trained(models[0])), judged, micro_batch_size=2)(batch)


def by_accumulator(models: Models, batch: Tensor) -> None:
    """The same, one micro-batch after the other."""
    accumulator = Accumulator(models, sgd(trained(models[0])), steps=4)
    for x in accumulator.over(batch.split(2)):
        accumulator.backward(judged(models, x))


@pytest.mark.parametrize("train", [by_big_step, by_accumulator])
@pytest.mark.parametrize("before", [None, 2.0])
def test_reentrant_checkpoints_leave_other_parameters_alone(
    train: Callable[[Models, Tensor], None], before: float | None
) -> None:
    """They have the gradients they had, the same tensors, and the update is the big batch's."""
    models, twins = [maker(), judge()], [maker(), judge()]
    batch = normal(8, 3, by=generator_of(0))
    held = None if before is None else torch.full_like(models[1].get_parameter("weight"), before)
    models[1].get_parameter("weight").grad = held
    train(models, batch)
    assert models[1].get_parameter("weight").grad is held
    assert held is None or held.unique().tolist() == [before]
    assert models[1].get_parameter("bias").grad is None
    judged(twins, batch).backward()
    sgd(trained(twins[0])).step()
    assert distance(weights(models[0]), weights(twins[0])) <= 1e-12


def test_an_autocast_around_several_steps_casts_weights_anew() -> None:
    """Its cache would go on with the weights from before the first update."""
    found = []
    for spanning in (True, False):
        model = seeded(lambda: nn.Linear(3, 1))().float()
        step = BigStep(model, sgd(trained(model)), lambda m, x: m(x).float().square().mean(), micro_batch_size=2)
        batch = normal(8, 3, by=generator_of(0)).float()
        with torch.autocast("cpu", torch.bfloat16) if spanning else nullcontext():
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    step(batch)
        found.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

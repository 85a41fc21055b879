"""Optimizers and schedulers that a framework has wrapped are taken for what they wrap."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from bigbatch import Accumulator, BigStep
from tests.support.reference import sgd, trained, weights
from tests.support.training import PLAIN, micro_batches

BATCHES = micro_batches((3, 1, 2), case=PLAIN)


def accelerator() -> Any:
    """Accelerate's, on the CPU."""
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def by_lightning(model: Any, optimizer: Any, scheduler: Any) -> Any:
    """As `self.optimizers()` of a LightningModule returns it."""
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    return model, lightning.LightningOptimizer(optimizer), scheduler


def by_fabric(model: Any, optimizer: Any, scheduler: Any) -> Any:
    """As `fabric.setup` returns them."""
    fabric = pytest.importorskip("lightning.fabric")
    return *fabric.Fabric(accelerator="cpu", devices=1).setup(model, optimizer), scheduler


def after_accelerate(model: Any, optimizer: Any, _: Any) -> Any:
    """A scheduler of the prepared optimizer."""
    model, optimizer = accelerator().prepare(model, optimizer)
    return model, optimizer, StepLR(optimizer, 1, 0.5)


WAYS: list[Callable[..., Any]] = [lambda *each: accelerator().prepare(*each), after_accelerate, by_lightning, by_fabric]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # torch watches the wrapper's own step
@pytest.mark.parametrize("entrance", ["Accumulator", "BigStep"])
@pytest.mark.parametrize("prepare", WAYS, ids=["accelerate", "after", "lightning", "fabric"])
def test_what_is_prepared_is_trained(prepare: Callable[..., Any], entrance: str) -> None:
    """The same weights and the same schedule as without the framework."""

    def run(prepared: Callable[..., Any]) -> tuple[list[torch.Tensor], float]:
        model = PLAIN.model()
        optimizer = sgd(trained(model))
        whole, wrapped, scheduler = prepared(model, optimizer, StepLR(optimizer, 1, 0.5))
        if entrance == "BigStep":
            BigStep(whole, wrapped, PLAIN.loss, micro_batch_size=2, scheduler=scheduler)(PLAIN.join(BATCHES))
        else:
            accumulator = Accumulator(whole, wrapped, steps=3, scheduler=scheduler)
            for batch in BATCHES:
                accumulator.backward(PLAIN.loss(whole, batch))
        return weights(model), optimizer.param_groups[0]["lr"]

    (found, rate), (true, true_rate) = run(prepare), run(lambda *each: each)
    assert all(torch.equal(a, b) for a, b in zip(found, true, strict=True))
    assert rate == true_rate

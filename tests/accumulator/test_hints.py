"""What is probably a mistake is warned of once, at the user's line; what may be meant is exact."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR, StepLR

from bigbatch import Accumulator, BigStep
from tests.support.reference import accumulated, big_batches, distance, sgd, trained, weights, windows
from tests.support.samples import Batch, Loss, mlp
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches(case=PLAIN)  # of 3, 1, 4, 2, 5, 1 and 2 samples


def told(train: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return what is told in a training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return caught


# Gradient hooks on parameters.

MASK = torch.tensor([[1.0], [0.0], [2.0], [1.0]], dtype=torch.float64)


def known(factor: float, gradient: Tensor) -> Tensor:
    """What a library has registered."""
    return gradient * factor


def after(parameter: Tensor) -> None:
    """Mask what has been added so far."""
    assert parameter.grad is not None
    parameter.grad *= MASK > 0


known.__module__ = "torch.distributed.fsdp"
HOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mask": lambda weight: weight.register_hook(lambda gradient: gradient * MASK),
    "after accumulation": lambda weight: weight.register_post_accumulate_grad_hook(after),
    "none": id,
    "none of the user's": lambda weight: weight.register_hook(partial(known, 0.5)),
}


def by_big_step(case: Loss, batches: list[Batch], steps: int, *, model: nn.Module) -> None:
    """Train with batches, in as many micro-batches."""
    step = BigStep(model, sgd(trained(model)), case.loss, micro_batch_size=18 // steps)
    for window in windows(batches, steps):
        step(case.join(window))


@pytest.mark.parametrize("batches", [BATCHES, [PLAIN.join(BATCHES)]], ids=["several", "one"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", [accumulated, by_big_step])
def test_gradient_hooks(way: Callable[..., Any], hook: str, batches: list[Batch]) -> None:
    """Where several micro-batches are added up. Those here are linear, so the big batch's gradient comes out."""
    model, twin, steps = mlp()(), mlp()(), len(batches)
    for each in (model, twin):
        HOOKS[hook](trained(each)[2])
    said = [str(each.message) for each in told(lambda: way(PLAIN, batches * 2, steps, model=model))]
    assert distance(weights(model), big_batches(PLAIN, batches * 2, steps, model=twin).weights) <= 1e-12
    assert len(said) == ("none" not in hook and steps > 1)
    assert all("'2.weight' has a gradient hook" in each and "clip_norm=" in each for each in said)


# Counts that come with a loss, `backward(loss, count=n)`, beside the one that its graph shows.


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over the targets that are not ignored: 2 and 1 of 3 and 1 in the first two micro-batches."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["partly"])


def samples(batch: Batch) -> int:
    """How many there are."""
    return len(batch["x"])


COUNTING: dict[str, tuple[Callable[[Any, Batch], Tensor], Callable[[Batch], Any], bool]] = {
    "samples for targets": (entropy, samples, True),
    "targets": (entropy, lambda b: (b["partly"] != -100).sum(), False),
    "samples for elements": (lambda m, b: m(b["x"]).square().mean(), samples, False),
    "a loss that cannot be read": (lambda m, b: m(b["x"]).square().mean().sqrt(), samples, False),
    "two terms": (lambda m, b: entropy(m, b) + m(b["x"]).square().mean(), samples, False),
    "a sum over as many features": (lambda m, _: m(BATCHES[2]["x"]).square().sum() / 4, lambda _: 4, False),
    "a sum": (lambda m, b: m(b["x"]).square().sum() / samples(b), samples, False),
}


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("steps", [3, 1])
def test_a_count_that_contradicts_the_graph(name: str, steps: int) -> None:
    """Both numbers are told; it is the user's word, so it counts. Of one micro-batch any count is the same."""
    loss, count, contradicts = COUNTING[name]
    training = Training(steps)

    def train() -> None:
        for batch in BATCHES * 2:
            training.accumulator.backward(loss(training.model, batch), count=count(batch))

    found = told(train)
    assert len(found) == (contradicts and steps > 1)
    assert all("in two micro-batches whose losses are means over" in str(each.message) for each in found)
    assert all(each.filename == __file__ for each in found)


# A scheduler that the old loop still steps.

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "step": lambda o: StepLR(o, 100),
    "sequential": lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 100)], milestones=[100]),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # torch's own, at the first
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("every", ["micro-batch", "update", "never"])
def test_a_scheduler_stepped_by_hand(name: str, every: str) -> None:
    """It would run through the schedule too fast; a loaded state is no call."""
    model = mlp()()
    optimizer = sgd(trained(model))
    scheduler = SCHEDULERS[name](optimizer)
    accumulator = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
    scheduler.load_state_dict(scheduler.state_dict())

    def train() -> None:
        for batch in accumulator.over(BATCHES):
            update = accumulator.backward(PLAIN.loss(model, batch))
            if every == "micro-batch" or (every == "update" and update is not None):
                scheduler.step()

    ours = [each for each in told(train) if "scheduler.step() was called by hand" in str(each.message)]
    assert [each.filename for each in ours] == ([] if every == "never" else [__file__])

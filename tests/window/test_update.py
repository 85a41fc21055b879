"""One update: its norm, its clipping, the hook before it, the scheduler after it, and what `Update` tells."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from bigbatch import Accumulator, Update
from tests.support.reference import big_batches, distance, sgd, trained, weights
from tests.support.samples import Batch, Loss
from tests.support.training import MASKED, PLAIN, SUMMED, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


def big_gradient(batches: list[Batch], case: Loss = MASKED) -> list[Tensor]:
    """The gradient of one real big batch, at the first weights."""
    model = case.model()
    return list(torch.autograd.grad(case.loss(model, case.join(batches)), trained(model)))


def one_window(training: Training, batches: list[Batch]) -> Update:
    """Train a single window and return its update."""
    (update,) = training.train(batches)
    return update


# What it tells.


@pytest.mark.parametrize("case", [MASKED, PLAIN, SUMMED], ids=str)
def test_the_loss_is_the_big_batchs(case: Loss) -> None:
    """Not the last micro-batch's, nor their average, nor, for a sum, a part of it."""
    update = one_window(Training(steps=7, case=case), BATCHES)
    true = big_batches(case, BATCHES, 7)
    assert float(update.loss) == pytest.approx(true.losses[0], rel=1e-12)
    assert update.loss.dtype == torch.float64
    assert not update.loss.requires_grad
    assert update.micro_batches == 7
    assert update.grad_norm is None
    assert update.extras is None
    assert case is SUMMED or update.count == pytest.approx(true.counts[0])


def test_an_update_is_frozen_and_reads_well() -> None:
    """It is a record of what was; printing it shows the numbers."""
    update = one_window(Training(steps=2, case=PLAIN, clip_norm=1.0), micro_batches((1, 1), PLAIN))
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.micro_batches = 3  # type: ignore[misc]  # that it cannot be set is the point
    assert repr(update).startswith(f"Update(loss={float(update.loss):.6g}, count=8, micro_batches=2, grad_norm=")
    assert repr(update).endswith("skipped=False)")


# Clipping.


@pytest.mark.parametrize("clip_norm", [0.01, 0.3, 1e6, math.inf, 1])
def test_the_norm_is_reported_before_clipping(clip_norm: float) -> None:
    """`grad_norm` is that of the big batch's gradient, whatever is then cut off."""
    update = one_window(Training(steps=7, clip_norm=clip_norm), BATCHES)
    norm = torch.cat([g.flatten() for g in big_gradient(BATCHES)]).norm()
    assert update.grad_norm is not None
    assert float(update.grad_norm) == pytest.approx(float(norm), rel=1e-12)


def test_clipping_happens_once_per_window() -> None:
    """Clipping each micro-batch, as a loop in the wrong order does, is something else."""
    training = Training(steps=3, clip_norm=0.05)
    training.train(BATCHES)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])
    each = MASKED.model()
    optimizer = sgd(trained(each))
    for batch in BATCHES[:3]:
        (MASKED.loss(each, batch) / 3).backward()
        clip_grad_norm_(trained(each), 0.05)
    optimizer.step()
    true = big_batches(MASKED, BATCHES[:3], 3, clip_norm=0.05)
    assert distance(weights(each), true.weights) > 1e-3


# The hook before the step.


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_the_hook_sees_the_big_batchs_gradient(clip_norm: float | None) -> None:
    """Corrected, and not clipped yet; once per window."""
    training = Training(steps=7, clip_norm=clip_norm)
    seen: list[list[Tensor]] = []
    training.accumulator.before_step(
        lambda: seen.append([p.grad.clone() for p in trained(training.model) if p.grad is not None])
    )
    one_window(training, BATCHES)
    assert len(seen) == 1
    assert distance(seen[0], big_gradient(BATCHES)) <= 1e-12
    training.assert_big_batches(BATCHES)


def test_the_hook_may_change_the_gradient() -> None:
    """What it leaves is what is clipped and stepped with, and what the norm is of."""
    training = Training(steps=7, clip_norm=1.0)

    def add_one() -> None:
        for p in trained(training.model):
            assert p.grad is not None
            p.grad.add_(1.0)

    training.accumulator.before_step(add_one)
    update = one_window(training, BATCHES)
    gradient = [g + 1 for g in big_gradient(BATCHES)]
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    assert update.grad_norm is not None
    assert float(update.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    expected = [w - 0.5 * g / norm for w, g in zip(weights(MASKED.model()), gradient, strict=True)]
    assert distance(training.weights, expected) <= 1e-6  # torch's own 1e-6 in the clip coefficient
    assert norm > 1


def test_the_hook_may_replace_the_gradient() -> None:
    """A new tensor in `.grad`, or none, is taken as it is."""
    training = Training(steps=7)
    first, *others = trained(training.model)

    def replace() -> None:
        first.grad = torch.ones_like(first)
        for p in others:
            p.grad = None

    training.accumulator.before_step(replace)
    one_window(training, BATCHES)
    before = weights(MASKED.model())
    assert torch.equal(training.weights[0], before[0] - 0.5)
    assert all(torch.equal(a, b) for a, b in zip(training.weights[1:], before[1:], strict=True))


def test_hooks_run_in_order_and_can_be_removed() -> None:
    """Each registration returns what undoes it, once or twice."""
    training = Training(steps=1)
    calls: list[str] = []
    remove = training.accumulator.before_step(lambda: calls.append("first"))
    training.accumulator.before_step(lambda: calls.append("second"))
    training.backward(BATCHES[0])
    remove()
    remove()
    training.backward(BATCHES[1])
    assert calls == ["first", "second", "second"]


def test_the_hook_is_not_called_for_a_window_of_nothing() -> None:
    """No gradient, no hook."""
    training = Training(steps=1)
    training.accumulator.before_step(lambda: pytest.fail("called"))
    (batch,) = micro_batches((2,))
    batch["partly"].fill_(-100)
    assert one_window(training, [batch]).skipped


# Schedulers.


def scheduled(steps: int, make: Callable[[Any], Any]) -> tuple[Training, Any]:
    """A training with a scheduler on its optimizer."""
    model = MASKED.model()
    optimizer = sgd(trained(model))
    scheduler = make(optimizer)
    training = Training(steps, model=model)
    training.optimizer = optimizer
    training.accumulator = Accumulator(model, optimizer, steps=steps, scheduler=scheduler)
    return training, scheduler


def test_the_scheduler_steps_once_per_update() -> None:
    """Three updates, three steps, each after its update; the rates are the big batch's."""
    training, scheduler = scheduled(3, lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    training.train(BATCHES)
    assert scheduler.get_last_lr() == [0.5 * 0.5**3]
    twin = MASKED.model()
    optimizer = sgd(trained(twin))
    by_hand = StepLR(optimizer, 1, gamma=0.5)
    for window in (BATCHES[:3], BATCHES[3:6], BATCHES[6:]):
        optimizer.zero_grad()
        MASKED.loss(twin, MASKED.join(window)).backward()
        optimizer.step()
        by_hand.step()
    assert distance(training.weights, weights(twin)) <= 1e-12


def test_several_schedulers() -> None:
    """One per optimizer, each stepped once."""
    models = [MASKED.model(), MASKED.model()]
    optimizers = [sgd(trained(model)) for model in models]
    schedulers = [StepLR(optimizer, 1, gamma=gamma) for optimizer, gamma in zip(optimizers, (0.5, 0.1), strict=True)]
    accumulator = Accumulator(models, optimizers, steps=1, scheduler=schedulers)
    accumulator.backward(MASKED.loss(models[0], BATCHES[0]) + MASKED.loss(models[1], BATCHES[0]))
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[0.25], [0.05]]

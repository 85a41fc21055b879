"""One update: its norm, its clipping, the hook before it, the scheduler after it, and what `Update` tells."""

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from bigbatch import Accumulator
from tests.support.reference import big_batches, distance, sgd, trained, weights
from tests.support.samples import Batch, Loss
from tests.support.training import MASKED, PLAIN, SUMMED, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


def big_gradient(batches: list[Batch], case: Loss = MASKED) -> list[Tensor]:
    """The gradient of one real big batch, at the first weights."""
    model = case.model()
    return list(torch.autograd.grad(case.loss(model, case.join(batches)), trained(model)))


@pytest.mark.parametrize("case", [MASKED, PLAIN, SUMMED], ids=str)
@pytest.mark.parametrize("clip_norm", [None, 0.01, 1, 1e6, math.inf])
def test_an_update_tells_what_the_big_batch_would(case: Loss, clip_norm: float | None) -> None:
    """Its loss, not the last micro-batch's or their average; its norm before clipping. It is frozen, and reads well."""
    (update,) = Training(steps=7, case=case, clip_norm=clip_norm).train(BATCHES)
    true = big_batches(case, BATCHES, 7)
    assert float(update.loss) == pytest.approx(true.losses[0], rel=1e-12)
    assert (update.loss.dtype, update.loss.requires_grad) == (torch.float64, False)
    assert (update.micro_batches, update.extras, update.skipped) == (7, None, False)
    assert case is SUMMED or update.count == pytest.approx(true.counts[0])
    norm = None if update.grad_norm is None else float(update.grad_norm)
    assert norm == (None if clip_norm is None else pytest.approx(true.norms[0], rel=1e-12))
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.micro_batches = 3  # type: ignore[misc]  # that it cannot be set is the point
    told = "" if norm is None else f"grad_norm={norm:.6g}, "
    assert re.fullmatch(
        rf"Update\(loss={float(update.loss):.6g}, count=[\d.]+, micro_batches=7, {told}skipped=False\)", repr(update)
    )


# The hook before the step.


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_the_hook_sees_the_big_batchs_gradient(clip_norm: float | None) -> None:
    """Corrected, and not clipped yet; once per window, not for a window of nothing, nor when it was removed."""
    training = Training(steps=7, clip_norm=clip_norm)
    seen: list[list[Tensor]] = []
    remove = training.accumulator.before_step(
        lambda: seen.append([p.grad.clone() for p in trained(training.model) if p.grad is not None])
    )
    training.accumulator.before_step(lambda: seen.append([]))
    training.train(BATCHES)
    training.assert_big_batches(BATCHES)
    (nothing,) = micro_batches((2,))
    nothing["partly"].fill_(-100)
    (update,) = training.train([nothing])
    assert update.skipped
    gradient, second = seen
    assert distance(gradient, big_gradient(BATCHES)) <= 1e-12
    assert not second  # in order
    remove()
    remove()
    training.train(BATCHES[:1])
    assert seen[2:] == [[]]


def test_the_hook_may_change_the_gradient() -> None:
    """What it leaves is what is clipped and stepped with, and what the norm is of; so is a new tensor, or none."""
    training = Training(steps=7, clip_norm=1.0)
    first, second, *others = trained(training.model)

    def change() -> None:
        first.grad, second.grad = torch.ones_like(first), None
        for p in others:
            assert p.grad is not None
            p.grad.add_(1.0)

    training.accumulator.before_step(change)
    (update,) = training.train(BATCHES)
    gradient = [torch.ones_like(first), torch.zeros_like(second), *(g + 1 for g in big_gradient(BATCHES)[2:])]
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    assert update.grad_norm is not None
    assert float(update.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    expected = [w - 0.5 * g / norm for w, g in zip(weights(MASKED.model()), gradient, strict=True)]
    assert distance(training.weights, expected) <= 1e-6  # torch's own 1e-6 in the clip coefficient
    assert norm > 1


# Schedulers.


def test_schedulers_step_once_per_update() -> None:
    """Three updates, three steps of each, after its update; the rates are the big batch's."""
    models, gammas = [MASKED.model(), MASKED.model()], (0.5, 0.1)
    optimizers = [sgd(trained(model)) for model in models]
    schedulers = [StepLR(each, 1, gamma=gamma) for each, gamma in zip(optimizers, gammas, strict=True)]
    accumulator = Accumulator(models, optimizers, steps=3, scheduler=schedulers)
    for batch in accumulator.over(BATCHES):
        accumulator.backward(MASKED.loss(models[0], batch) + MASKED.loss(models[1], batch))
    for model, scheduler, gamma in zip(models, schedulers, gammas, strict=True):
        twin = MASKED.model()
        for number, window in enumerate((BATCHES[:3], BATCHES[3:6], BATCHES[6:])):
            twin.zero_grad()
            MASKED.loss(twin, MASKED.join(window)).backward()
            torch.optim.SGD(twin.parameters(), lr=0.5 * gamma**number).step()
        assert scheduler.get_last_lr() == pytest.approx([0.5 * gamma**3])
        assert distance(weights(model), weights(twin)) <= 1e-12

"""What skips a step: loss scaling and `skip_nonfinite`. An inf anywhere leaves out the whole window, and no other."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import StepLR

from bigbatch import Accumulator
from bigbatch.errors import LossError
from tests.support.reference import (
    FLOOR,
    OptimizerFactory,
    accumulated,
    assert_equal,
    big_batches,
    distance,
    sgd,
    state,
    trained,
    weights,
)
from tests.support.samples import Batch, Loss
from tests.support.training import MASKED, PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples
SCALE, INF, NAN = 1024.0, float("inf"), float("nan")


def scaler(**options: Any) -> GradScaler:
    """A scaler for the CPU."""
    return GradScaler("cpu", init_scale=SCALE, **options)


def broken(place: int, value: float = INF) -> list[Batch]:
    """Seven micro-batches, one of them with a target that makes its gradient infinite or NaN."""
    batches = micro_batches(case=PLAIN)
    batches[place]["value"][0, 0] = value
    return batches


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("case", [MASKED, PLAIN], ids=str)
def test_a_scaled_window_is_the_big_batch(case: Loss, clip_norm: float | None) -> None:
    """The scale goes in before the backward and out before clipping."""
    training = Training(steps=3, case=case, scaler=scaler(), clip_norm=clip_norm)
    updates = training.train(BATCHES)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])
    assert float(updates[0].loss) == pytest.approx(big_batches(case, BATCHES, 3).losses[0], rel=1e-12)


def test_the_scaler_is_updated_once_per_window() -> None:
    """`growth_interval=2` is two updates, of three."""
    used = scaler(growth_interval=2)
    training = Training(steps=3, scaler=used)
    epoch = training.accumulator.over(BATCHES)
    scales = [used.get_scale() for batch in epoch if training.backward(batch) is not None]
    assert scales == [SCALE, 2 * SCALE, 2 * SCALE]


# A window with an inf.

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: SGD(p, lr=0.1, foreach=False),
    "sgd-fused": lambda p: SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "momentum-foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "momentum-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adagrad-fused": lambda p: Adagrad(p, lr=0.01, fused=True),
}


@pytest.fixture
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """A buffer that was made and not written to must show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_uninitialised_memory_is_nan")
@pytest.mark.parametrize(
    ("window", "place", "value"), [(0, 0, INF), (0, 1, INF), (0, 2, INF), (1, 4, NAN), (2, 6, INF)]
)
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [  # where a scaler skips the first step of fused SGD, torch starts its momentum from garbage
        (name, how)
        for name in OPTIMIZERS
        for how in ("", "scheduled", "scaler")
        if (name, how) != ("momentum-fused", "scaler")
    ],
)
def test_the_window_is_left_out(optimizer: str, how: str, window: int, place: int, value: float) -> None:
    """Weights, optimizer state and rates are those of the other windows alone; the norm is told where it is asked."""
    make, clip_norm = OPTIMIZERS[optimizer], 1e6 if window == 1 else None
    model, batches = PLAIN.model(), broken(place, value)
    updater = make(trained(model))
    scheduler = StepLR(updater, 1, gamma=1.0) if how else None
    used = scaler() if how == "scaler" else None
    accumulator = Accumulator(
        model, updater, steps=3, scheduler=scheduler, skip_nonfinite=used is None, clip_norm=clip_norm, scaler=used
    )
    updates = [u for b in accumulator.over(batches) if (u := accumulator.backward(PLAIN.loss(model, b))) is not None]
    assert [update.skipped for update in updates] == [each == window for each in range(3)]
    norms = [None if update.grad_norm is None else bool(update.grad_norm.isfinite()) for update in updates]
    assert norms == [None if clip_norm is None else each != window for each in range(3)]
    windows = [batches[:3], batches[3:6], batches[6:]]
    windows.pop(window)
    true = big_batches(PLAIN, [b for each in windows for b in each], [len(w) for w in windows], optimizer=make)
    assert distance(weights(model), true.weights) <= 1e-12
    assert distance(state(updater), true.state, FLOOR) <= 1e-12
    assert scheduler is None or scheduler.last_epoch == 2
    assert used is None or used.get_scale() == SCALE / 2


@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_in_one_of_two_optimizers_skips_both(bad: int) -> None:
    """A window is one update: half of it is none."""
    models, used = [PLAIN.model(), PLAIN.model()], scaler()
    optimizers = [AdamW(trained(model), lr=0.1) for model in models]
    accumulator = Accumulator(models, optimizers, steps=3, scaler=used)
    update = None
    for batch, other in zip(broken(1)[:3], micro_batches(case=PLAIN), strict=False):
        pair = [other, batch] if bad else [batch, other]
        losses = [PLAIN.loss(model, each) for model, each in zip(models, pair, strict=True)]
        update = accumulator.backward(losses[0] + losses[1])
    assert update is not None
    assert update.skipped
    assert used.get_scale() == SCALE / 2
    for model, optimizer in zip(models, optimizers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(PLAIN.model()), strict=True))
        assert not optimizer.state


def test_a_hook_that_breaks_the_gradient_is_seen() -> None:
    """What counts is the gradient that would be stepped with."""
    training = Training(steps=1, case=PLAIN, skip_nonfinite=True)
    first = trained(training.model)[0]
    training.accumulator.before_step(lambda: setattr(first, "grad", torch.full_like(first, NAN)))
    (update,) = training.train(micro_batches((3,), PLAIN))
    assert update.skipped
    training.assert_untouched()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw-foreach", "adamw-fused"])
def test_by_default_it_does_what_torch_does(optimizer: str) -> None:
    """The step is made, NaN and all, as by a big batch."""
    batches = broken(1, NAN)[:3]
    training = Training(steps=3, case=PLAIN, optimizer=OPTIMIZERS[optimizer])
    (update,) = training.train(batches)
    assert not update.skipped
    twin = PLAIN.model()
    updater = OPTIMIZERS[optimizer](trained(twin))
    PLAIN.loss(twin, PLAIN.join(batches)).backward()
    updater.step()
    assert any(w.isnan().any() for w in weights(twin))
    torch.testing.assert_close(training.weights, weights(twin), rtol=1e-10, atol=0, equal_nan=True)


TWICE: dict[str, Callable[[GradScaler, Tensor], Tensor]] = {
    "scaled": lambda used, loss: used.scale(loss),
    "divided-then-scaled": lambda used, loss: used.scale(loss / 4),
    "scaled-then-divided": lambda used, loss: used.scale(loss) / 4,
    "scaled-and-more": lambda used, loss: used.scale(loss) + loss,
    "negated": lambda used, loss: -used.scale(loss),
}


@pytest.mark.parametrize("how", TWICE)
def test_a_loss_that_was_scaled_by_hand_is_refused(how: str) -> None:
    """It would be scaled twice; the error says what to pass."""
    used = scaler()
    training = Training(steps=3, scaler=used)
    loss = TWICE[how](used, MASKED.loss(training.model, BATCHES[0]))
    with pytest.raises(LossError, match=r"already been through scaler.scale\(\).*\n.*accumulator.backward\(loss\)"):
        training.accumulator.backward(loss)
    training.assert_untouched()


# Low precision.


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [MASKED, PLAIN], ids=str)
def test_autocast_is_the_big_batch_up_to_its_own_rounding(case: Loss, dtype: torch.dtype, scaled: bool) -> None:
    """float32 parameters under fp16 and bf16 autocast: what differs is the model's rounding, not the weights."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return case.loss(model, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()})

    batches, used = micro_batches((5, 1, 3, 2), case), scaler() if scaled else None
    ours = accumulated(case, batches, 4, model=case.model().float(), loss=loss, scaler=used)
    assert_equal(ours, big_batches(case, batches, 4, model=case.model().float(), loss=loss), tolerance=0.02)


def test_float16_parameters_with_a_scaler() -> None:
    """Torch refuses to unscale fp16 gradients; these have been added up in float32, and are rounded for the step."""
    model = PLAIN.model().half()
    accumulator = Accumulator(model, sgd(trained(model)), steps=7, scaler=scaler())
    for batch in accumulator.over(BATCHES):
        accumulator.backward((model(batch["x"].half()).float() - batch["value"].float()).pow(2).mean())
    assert distance(weights(model), big_batches(PLAIN, BATCHES, 7).weights) <= 2e-3

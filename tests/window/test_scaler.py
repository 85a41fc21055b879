"""Loss scaling and autocast: one unscale, one step, one update of the scaler per window; an inf skips all of it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import StepLR

from bigbatch import Accumulator
from bigbatch.errors import LossError
from tests.support.reference import accumulated, assert_equal, big_batches, distance, sgd, state, trained, weights
from tests.support.samples import Batch, Loss
from tests.support.training import MASKED, PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples
SCALE = 1024.0


def scaler(**options: Any) -> GradScaler:
    """A scaler for the CPU."""
    return GradScaler("cpu", init_scale=SCALE, **options)


def with_inf(place: int) -> list[Batch]:
    """Micro-batches of which one has an infinite target, and so an infinite gradient."""
    batches = micro_batches(case=PLAIN)
    batches[place]["value"][0, 0] = float("inf")
    return batches


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("case", [MASKED, PLAIN], ids=str)
def test_a_scaled_window_is_the_big_batch(case: Loss, clip_norm: float | None) -> None:
    """The scale goes in before the backward and out before clipping."""
    training = Training(steps=3, case=case, scaler=scaler(), clip_norm=clip_norm)
    updates = training.train(BATCHES)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])
    true = big_batches(case, BATCHES, 3)
    assert [float(update.loss) for update in updates[:1]] == pytest.approx(true.losses[:1], rel=1e-12)


def test_the_scaler_is_called_once_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unscale, one step and one update for each of three windows: `growth_interval=2` is two updates."""
    used, calls = scaler(growth_interval=2), Counter[str]()

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(used, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return counted

    for name in ("unscale_", "step", "update"):
        monkeypatch.setattr(used, name, counting(name))
    training = Training(steps=3, scaler=used)
    epoch = training.accumulator.over(BATCHES)
    scales = [used.get_scale() for batch in epoch if training.backward(batch) is not None]
    assert scales == [SCALE, 2 * SCALE, 2 * SCALE]
    assert calls == {"unscale_": 3, "step": 3, "update": 3}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_inf_in_any_micro_batch_skips_the_window_once(place: int) -> None:
    """No step, no scheduler step, the scale halved once; the next windows are exact."""
    model = PLAIN.model()
    optimizer = torch.optim.SGD(trained(model), lr=0.5, momentum=0.9)
    scheduler = StepLR(optimizer, 1, gamma=1.0)
    used = scaler()
    accumulator = Accumulator(model, optimizer, steps=3, scaler=used, scheduler=scheduler, clip_norm=1.0)
    batches = with_inf(place)
    updates = [u for b in accumulator.over(batches) if (u := accumulator.backward(PLAIN.loss(model, b))) is not None]
    assert [update.skipped for update in updates] == [True, False, False]
    assert used.get_scale() == SCALE / 2
    assert scheduler.last_epoch == 2
    true = big_batches(
        PLAIN, batches[3:], 3, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), clip_norm=1.0
    )
    assert distance(weights(model), true.weights) <= 1e-12
    assert distance(state(optimizer), true.state) <= 1e-12


@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_in_one_of_two_optimizers_skips_both(bad: int) -> None:
    """A window is one update: half of it is none."""
    models = [PLAIN.model(), PLAIN.model()]
    optimizers = [torch.optim.AdamW(trained(model), lr=0.1) for model in models]
    used = scaler()
    accumulator = Accumulator(models, optimizers, steps=3, scaler=used)
    good = micro_batches(case=PLAIN)
    skipped = []
    for batch, other in zip(accumulator.over(with_inf(1)[:3]), good, strict=False):
        pair = [other, batch] if bad else [batch, other]
        losses = [PLAIN.loss(model, each) for model, each in zip(models, pair, strict=True)]
        update = accumulator.backward(losses[0] + losses[1])
        skipped.append(update is not None and update.skipped)
    assert skipped == [False, False, True]
    assert used.get_scale() == SCALE / 2
    for model, optimizer in zip(models, optimizers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(PLAIN.model()), strict=True))
        assert not optimizer.state


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


# Autocast.


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [MASKED, PLAIN], ids=str)
def test_autocast_is_the_big_batch_up_to_its_own_rounding(case: Loss, dtype: torch.dtype, scaled: bool) -> None:
    """float32 parameters under fp16 and bf16 autocast: what differs is the model's rounding, not the weights."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return case.loss(model, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()})

    batches = micro_batches((5, 1, 3, 2), case)
    used = scaler() if scaled else None
    ours = accumulated(case, batches, 4, model=case.model().float(), loss=loss, scaler=used)
    true = big_batches(case, batches, 4, model=case.model().float(), loss=loss)
    assert_equal(ours, true, tolerance=0.02)


def test_float16_parameters_with_a_scaler() -> None:
    """Torch refuses to unscale fp16 gradients; these have been added up in float32, and are rounded for the step."""
    model = PLAIN.model().half()
    accumulator = Accumulator(model, sgd(trained(model)), steps=7, scaler=scaler())
    for batch in accumulator.over(BATCHES):
        loss = (model(batch["x"].half()).float() - batch["value"].float()).pow(2).mean()
        accumulator.backward(loss)
    true = big_batches(PLAIN, BATCHES, 7)
    assert distance(weights(model), true.weights) <= 2e-3

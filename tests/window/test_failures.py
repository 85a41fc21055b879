"""What fails between the last backward and the end of an update is named, with what is true of the window then."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from bigbatch import Accumulator
from bigbatch.errors import LossError, WindowBroken
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import mlp
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


def fail(*_: Any, **__: Any) -> Any:
    """Fail, as a user's own code may."""
    message = "no space left on device"
    raise OSError(message)


FAILING: dict[str, tuple[Callable[[Training], Callable[[], object]], str]] = {
    "hook": (lambda t: t.accumulator.before_step(fail), "a before_step hook {} Nothing was stepped"),
    "step": (
        lambda t: t.optimizer.register_step_pre_hook(fail).remove,
        "optimizer.step() {} It may have changed some parameters",
    ),
}


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=4.0)], ids=["plain", "scaler"])
@pytest.mark.parametrize("name", FAILING)
def test_what_fails_at_the_end_is_named(name: str, scaler: torch.amp.GradScaler | None) -> None:
    """Every call says the same, and dropping the window makes the next one exact."""
    register, text = FAILING[name]
    training = Training(steps=2, scaler=scaler)
    remove = register(training)
    training.backward(BATCHES[0])
    with pytest.raises(OSError, match="no space"):
        training.backward(BATCHES[1])
    calls: list[Callable[[], object]] = [
        lambda: training.backward(BATCHES[0]),
        training.accumulator.flush,
        training.accumulator.state_dict,
        lambda: training.accumulator.over(BATCHES),
    ]
    told = re.escape(text.format("failed with OSError: no space left on device."))
    for call in calls:
        with pytest.raises(WindowBroken, match=told + r"(.|\n)*accumulator.discard\(\)") as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)
    training.accumulator.discard()
    training.assert_untouched()
    remove()
    training.train(BATCHES[:4])
    training.assert_big_batches(BATCHES[:2], BATCHES[2:4])


def test_a_step_that_fails_after_another_has_stepped() -> None:
    """The first optimizer's parameters are changed, and the error says so; nor does it say so of a scheduler."""
    model = mlp()()
    first, second = trained(model)[:2], trained(model)[2:]
    before = weights(model)
    optimizers = [sgd(first), torch.optim.AdamW(second)]
    accumulator = Accumulator(model, optimizers, steps=1)
    hook = optimizers[1].register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no space"):
        accumulator.backward(PLAIN.loss(model, BATCHES[0]))
    with pytest.raises(WindowBroken, match="may have changed some parameters"):
        accumulator.flush()
    assert distance(weights(model)[:2], before[:2]) > 0
    accumulator.discard()
    hook.remove()
    scheduler = LambdaLR(optimizers[0], lambda step: 1.0 if step == 0 else fail())
    accumulator = Accumulator(model, optimizers, steps=1, scheduler=scheduler)
    with pytest.raises(OSError, match="no space"):
        accumulator.backward(PLAIN.loss(model, BATCHES[0]))
    with pytest.raises(WindowBroken, match="The optimizer has stepped; a scheduler has not"):
        accumulator.flush()


# Losses that reach nothing.


@pytest.mark.parametrize("place", [0, 2])
def test_a_loss_that_reaches_no_parameter_is_refused(place: int) -> None:
    """At a window's first micro-batch; everything is as before."""
    training = Training(steps=2, case=PLAIN)
    other = nn.Linear(3, 1).double()
    for batch in BATCHES[:place]:
        training.backward(batch)
    with pytest.raises(
        LossError,
        match=r"this loss reaches none of the optimizer's 4 parameters: nothing was added(.|\n)*detach",
    ):
        training.accumulator.backward(other(BATCHES[place]["x"]).pow(2).mean())
    assert training.accumulator.remaining == 2
    assert all(p.grad is None for p in [*other.parameters(), *training.model.parameters()])
    training.train(BATCHES[place:])
    training.assert_big_batches(*(BATCHES[start : start + 2] for start in range(0, len(BATCHES), 2)))


def test_a_loss_that_reaches_no_parameter_after_one_that_counted_nothing() -> None:
    """The first backward counts, not the first micro-batch."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    other = mlp()()
    ignored = torch.full_like(BATCHES[0]["label"], -100)
    accumulator.backward(F.cross_entropy(model(BATCHES[0]["x"]), ignored))
    with pytest.raises(LossError, match="reaches none"):
        accumulator.backward(F.cross_entropy(other(BATCHES[1]["x"]), BATCHES[1]["label"]))
    assert accumulator.remaining == 2


def test_a_loss_that_reaches_one_parameter_is_fine() -> None:
    """The others may come later, or never."""
    model: Any = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=1)
    update = accumulator.backward(F.mse_loss(model[2](torch.zeros(2, 5, dtype=torch.float64)), BATCHES[3]["value"]))
    assert update is not None
    assert not update.skipped

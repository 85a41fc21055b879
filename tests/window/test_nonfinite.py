"""`skip_nonfinite`: a window with an inf or NaN in its gradient is left out; by default it does what torch does."""

from collections.abc import Iterator

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from bigbatch import Accumulator
from tests.support.reference import FLOOR, OptimizerFactory, big_batches, distance, state, trained, weights
from tests.support.samples import Batch
from tests.support.training import PLAIN, Training, micro_batches

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "momentum-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "momentum-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """A buffer that was made and not written to must show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def broken(place: int, value: float) -> list[Batch]:
    """Seven micro-batches, one of them with a target that makes its gradient infinite or NaN."""
    batches = micro_batches(case=PLAIN)
    batches[place]["value"][0, 0] = value
    return batches


@pytest.mark.parametrize(("window", "value"), [(0, float("inf")), (1, float("nan")), (2, float("inf"))])
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_window_is_left_out(optimizer: str, scheduled: bool, window: int, value: float) -> None:
    """Weights, optimizer state and rates are those of the other windows alone; the norm is told where it is asked."""
    make, clip_norm = OPTIMIZERS[optimizer], 1e6 if window == 1 else None
    model = PLAIN.model()
    updater = make(trained(model))
    scheduler = StepLR(updater, 1, gamma=1.0) if scheduled else None
    accumulator = Accumulator(model, updater, steps=3, scheduler=scheduler, skip_nonfinite=True, clip_norm=clip_norm)
    batches = broken(3 * window + (1 if window < 2 else 0), value)
    updates = [u for b in accumulator.over(batches) if (u := accumulator.backward(PLAIN.loss(model, b))) is not None]
    assert [update.skipped for update in updates] == [place == window for place in range(3)]
    norms = [None if update.grad_norm is None else bool(update.grad_norm.isfinite()) for update in updates]
    assert norms == [None if clip_norm is None else place != window for place in range(3)]
    windows = [batches[:3], batches[3:6], batches[6:]]
    windows.pop(window)
    true = big_batches(PLAIN, [b for each in windows for b in each], [len(w) for w in windows], optimizer=make)
    assert distance(weights(model), true.weights) <= 1e-12
    assert distance(state(updater), true.state, FLOOR) <= 1e-12
    assert scheduler is None or scheduler.last_epoch == 2


def test_a_hook_that_breaks_the_gradient_is_seen() -> None:
    """What counts is the gradient that would be stepped with."""
    training = Training(steps=1, case=PLAIN, skip_nonfinite=True)
    first = trained(training.model)[0]
    training.accumulator.before_step(lambda: setattr(first, "grad", torch.full_like(first, float("nan"))))
    update = training.backward(micro_batches(case=PLAIN)[0])
    assert update is not None
    assert update.skipped
    training.assert_untouched()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw-foreach", "adamw-fused"])
def test_by_default_it_does_what_torch_does(optimizer: str) -> None:
    """The step is made, NaN and all, as by a big batch."""
    batches = broken(1, float("nan"))[:3]
    training = Training(steps=3, case=PLAIN, optimizer=OPTIMIZERS[optimizer])
    (update,) = training.train(batches)
    assert not update.skipped
    twin = PLAIN.model()
    updater = OPTIMIZERS[optimizer](trained(twin))
    PLAIN.loss(twin, PLAIN.join(batches)).backward()
    updater.step()
    assert any(w.isnan().any() for w in weights(twin))
    torch.testing.assert_close(training.weights, weights(twin), rtol=1e-10, atol=0, equal_nan=True)

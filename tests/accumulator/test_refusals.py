"""What cannot work is answered at once, with what was found and what to type; see tests/messages/accumulator.txt."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from bigbatch import Accumulator, counted
from bigbatch.errors import BigBatchError
from tests.support.losses import SEVERAL, kept, masked_and_mean, squares
from tests.support.messages import approve
from tests.support.reference import sgd, trained
from tests.support.samples import Batch, Loss, Tempered, mlp, rows, seeded, sequences
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples
TWO_TERMS = Loss(
    "ce+mse",
    mlp(),
    sequences,
    lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()) + F.mse_loss(m(b["x"]), b["value"]),
)
COUNTED = Loss(
    "counted",
    mlp(),
    rows,
    lambda m, b: counted(m(b["x"]).pow(2).mean(), len(b["x"])) + F.cross_entropy(m(b["x"]), b["partly"]),
)
SUM_BESIDE_MEANS = Loss("sum+mean", mlp(), sequences, lambda m, b: masked_and_mean(m, b) + m(b["x"]).abs().sum())
LEARNED = Loss("one factor", seeded(Tempered), sequences, lambda m, b: m.s.exp() * SEVERAL[0].loss(m, b))
BARE = Loss("sum-s", seeded(Tempered), rows, lambda m, b: squares(m, b).sum() - m.s)


def uncertainty(model: Any, batch: Batch) -> Tensor:
    """Kendall's learned weights over two terms with counts of their own, and the logarithms themselves."""
    out = model(batch["x"])
    ce = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
    return (-model.s).exp() * ce + model.s + 0.5 * (-model.t).exp() * F.mse_loss(out, batch["value"]) + 0.5 * model.t


def train(case: Loss, counts: Callable[[Batch], Any] | None = None, *, without: int = -1) -> None:
    """Train, perhaps with totals that are not those of the losses, or with a batch whose loss is left out."""
    training = Training(steps=3, case=case, counts=counts)
    for place, batch in enumerate(training.accumulator.over(case.micro_batches((4, 2, 3)))):
        if place != without:
            training.backward(batch)


def nan_mean(out: Tensor, batch: Batch) -> Tensor:
    """A mean over what is known."""
    return torch.nanmean((out**2).masked_fill(batch["value"].isnan(), torch.nan))


def follow(*losses: Callable[[Tensor, Batch], Tensor]) -> None:
    """Try to accumulate these losses in one window."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=len(losses) + 1)
    for loss in losses:
        accumulator.backward(loss(model(BATCHES[0]["x"]), BATCHES[0]))


def made(
    model: Any = None,
    optimizer: Callable[[nn.Module], Any] = lambda model: sgd(trained(model)),
    scheduler: Callable[[Any], Any] = id,
) -> None:
    """Pass another model, optimizer or scheduler than a real one."""
    real = mlp()()
    given = optimizer(real)
    own = {} if scheduler is id else {"scheduler": scheduler(given)}
    Accumulator(real if model is None else model, given, steps=2, **own)


def twice(change: Callable[[Training, Batch], Any]) -> None:
    """Do something in mid-window, which goes on as it was."""
    training = Training(steps=2)
    batches = iter(training.accumulator.over(BATCHES[:3]))
    batch = next(batches)
    training.backward(batch)
    try:
        change(training, batch)
    finally:
        for each in batches:
            training.backward(each)
        training.assert_big_batches(BATCHES[:2], BATCHES[2:3])


def nest_wrongly() -> None:
    """Look a window ahead around another accumulator, whose batches would be taken too early."""
    counting = Training(steps=4, case=PLAIN, counts=lambda batch: batch["value"].numel())
    counting.accumulator.over(Training(steps=3).accumulator.over(BATCHES))


def set_steps(training: Training, steps: Any) -> None:
    """Set steps, between windows or in mid-window."""
    training.accumulator.steps = steps


NO_STEPS: tuple[Any, ...] = (0, 4.0, True, "4", math.inf)
REFUSED: dict[str, Callable[[], Any]] = {
    **{f"steps {steps!r}": partial(Training, steps) for steps in NO_STEPS},
    "steps set to nothing": lambda: set_steps(Training(steps=2), None),
    "steps set in mid-window": lambda: twice(lambda training, _: set_steps(training, 5)),
    **{f"clip_norm {norm!r}": partial(Training, 2, clip_norm=norm) for norm in (0, math.nan, "1", True)},
    **{f"gradient_dtype {d!r}": partial(Training, 2, gradient_dtype=d) for d in (torch.bfloat16, "float32")},
    "batch_norm": lambda: Training(2, batch_norm=None),
    "counts": lambda: Training(2, counts=(3, 4)),
    "scaler": lambda: Training(2, scaler="amp"),
    "scheduler": lambda: Training(2, scheduler=0.1),
    "scheduler of a metric": lambda: made(scheduler=ReduceLROnPlateau),
    "scheduler of another optimizer": lambda: made(scheduler=lambda _: StepLR(sgd(trained(mlp()())), 1)),
    "optimizer of another model": lambda: made(optimizer=lambda _: SGD(mlp()().parameters(), lr=0.1)),
    "two optimizers of a parameter": lambda: made(optimizer=lambda m: [sgd(trained(m)), sgd(trained(m))]),
    "optimizer class": lambda: made(optimizer=lambda _: SGD),
    "no optimizer": lambda: made(optimizer=lambda _: []),
    "lbfgs": lambda: made(optimizer=lambda m: LBFGS(m.parameters())),
    "model function": lambda: made(mlp()),
    "no model": lambda: made([]),
    "optimizer first": lambda: Accumulator(sgd(trained(mlp()())), mlp()(), steps=2),  # type: ignore[arg-type]
    "loader of an int": lambda: Training(steps=2).accumulator.over(5),  # type: ignore[arg-type]
    "loader of a function": lambda: Training(steps=2).accumulator.over(lambda: BATCHES),  # type: ignore[arg-type]
    "two losses of a batch": lambda: twice(lambda t, batch: t.backward(batch)),
    "counts around another": nest_wrongly,
    "counts outside over": lambda: Training(2, case=TWO_TERMS, counts=len).backward(TWO_TERMS.batch(3, 0)),
    "counts of changing number": lambda: train(PLAIN, lambda b: (1,) * len(b["x"])),
    "three counts for two terms": lambda: train(TWO_TERMS, lambda _: (1, 2, 3)),
    "samples for tokens": lambda: train(TWO_TERMS, lambda b: (len(b["x"]), b["value"].numel())),
    "samples for elements": lambda: train(TWO_TERMS, lambda b: (kept(b), len(b["x"]))),
    "another count than counted": lambda: train(COUNTED, lambda b: (4 * len(b["x"]), (b["partly"] != -100).sum())),
    "a batch passed over": lambda: train(SEVERAL[0], SEVERAL[0].counts, without=1),
    "a sum beside means": lambda: train(SUM_BESIDE_MEANS),
    "bare parameters beside several counts": lambda: train(
        Loss("uncertainty", seeded(Tempered), sequences, uncertainty), lambda b: (kept(b), b["value"].numel())
    ),
    "a bare parameter beside a sum": lambda: train(BARE),
    "one learned factor": lambda: train(LEARNED, SEVERAL[0].counts),
    "a sum after a mean": lambda: follow(lambda o, _: o.square().mean(), lambda o, _: o.square().sum()),
    "another factor": lambda: follow(lambda o, _: 0.5 * o.abs().mean(), lambda o, _: 0.3 * o.abs().mean()),
    "zero after a mean": lambda: follow(lambda o, _: o.abs().mean(), lambda o, _: 0.0 * o.abs().mean()),
    "a mean after zero": lambda: follow(lambda o, _: 0.0 * o.abs().mean(), lambda o, _: o.abs().mean()),
    "nanmean": lambda: follow(nan_mean),
    "nansum": lambda: follow(lambda o, b: torch.nansum(o - b["value"])),
    "einsum": lambda: follow(lambda o, b: torch.einsum("bi,bi->", o, b["value"])),
    "einsum of two": lambda: follow(lambda o, _: torch.einsum("bi,bi->", o, o)),
    "rmse": lambda: follow(lambda o, b: F.mse_loss(o, b["value"]).sqrt()),
    "rmse with an epsilon": lambda: follow(lambda o, b: (F.mse_loss(o, b["value"]) + 1e-8).sqrt()),
    "rmse as a power": lambda: follow(lambda o, b: F.mse_loss(o, b["value"]) ** 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_answered_at_once(name: str) -> None:
    """Not at the first batch, nor with Python's own words; for this loss, not for losses in general."""
    with pytest.raises(BigBatchError) as caught:
        REFUSED[name]()
    approve("accumulator", name, caught.value)
    assert isinstance(caught.value, ValueError) is not isinstance(caught.value, RuntimeError)


def known(batch: Batch) -> Tensor:
    """How many numbers are known."""
    return (~batch["value"].isnan()).sum()


ADVISED: dict[str, tuple[Loss, Callable[[Batch], Any] | None, Callable[[Batch], Any] | None]] = {
    "nanmean": (Loss("nanmean", mlp(), rows, lambda m, b: nan_mean(m(b["x"]), b)), known, None),
    "a sum beside means": (SUM_BESIDE_MEANS, None, lambda b: (kept(b), b["value"].numel(), "sum")),
    "a bare parameter beside a sum": (
        Loss("counted", seeded(Tempered), rows, lambda m, b: squares(m, b).sum() - counted(m.s, "once")), None, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVISED)
def test_what_a_message_advises_is_exact(name: str) -> None:
    """The line that it prints is."""
    case, count, counts = ADVISED[name]
    batches = case.micro_batches((3, 2, 4))
    if name == "nanmean":
        for batch in batches:
            batch["value"][0, :2] = torch.nan
    training = Training(steps=3, case=case, counts=counts)
    for batch in training.accumulator.over(batches):
        training.accumulator.backward(case.loss(training.model, batch), count=count(batch) if count else None)
    training.assert_big_batches(batches)

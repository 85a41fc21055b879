"""Frequent slips are answered with what was found and what to type; the texts are in tests/messages/slips.txt."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR, StepLR

from bigbatch import Accumulator, counted
from bigbatch.errors import BigBatchError
from tests.support.losses import SEVERAL
from tests.support.messages import approve
from tests.support.reference import sgd, trained
from tests.support.samples import Batch, Loss, mlp, rows, sequences
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


def miscounted(case: Loss, counts: Callable[[Batch], tuple[Any, ...]]) -> None:
    """Train with totals that are not those of the losses."""
    training = Training(steps=3, case=case, counts=counts)
    training.train(case.micro_batches((4, 2, 3)))


def pass_over_a_batch() -> None:
    """Count a batch, and leave its loss out."""
    case = SEVERAL[0]
    training = Training(steps=3, case=case, counts=case.counts)
    batches = case.micro_batches((3, 2, 4))
    for batch in training.accumulator.over(batches):
        if batch is not batches[1]:
            training.backward(batch)


def nan_mean(out: Tensor, batch: Batch) -> Tensor:
    """A mean over what is known."""
    return torch.nanmean((out**2).masked_fill(batch["value"].isnan(), torch.nan))


def backward(loss: Callable[[Tensor, Batch], Tensor]) -> None:
    """Try to accumulate a loss."""
    model = mlp()()
    Accumulator(model, sgd(trained(model)), steps=2).backward(loss(model(BATCHES[0]["x"]), BATCHES[0]))


SLIPS: dict[str, Callable[[], Any]] = {
    "loader of an int": lambda: Training(steps=2).accumulator.over(5),  # type: ignore[arg-type]
    "loader of a function": lambda: Training(steps=2).accumulator.over(lambda: BATCHES),  # type: ignore[arg-type]
    "steps of a float": lambda: Training(steps=64 / 16),  # type: ignore[arg-type]
    "optimizer first": lambda: Accumulator(sgd(trained(mlp()())), mlp()(), steps=2),  # type: ignore[arg-type]
    "samples for tokens": lambda: miscounted(TWO_TERMS, lambda b: (len(b["x"]), b["value"].numel())),
    "samples for elements": lambda: miscounted(TWO_TERMS, lambda b: ((b["labels"] != -100).sum(), len(b["x"]))),
    "another count than counted": lambda: miscounted(COUNTED, lambda b: (4 * len(b["x"]), (b["partly"] != -100).sum())),
    "a batch passed over": pass_over_a_batch,
    "nanmean": lambda: backward(nan_mean),
    "nansum": lambda: backward(lambda o, b: torch.nansum(o - b["value"])),
    "einsum": lambda: backward(lambda o, b: torch.einsum("bi,bi->", o, b["value"])),
    "einsum of two": lambda: backward(lambda o, _: torch.einsum("bi,bi->", o, o)),
    "rmse": lambda: backward(lambda o, b: F.mse_loss(o, b["value"]).sqrt()),
    "rmse with an epsilon": lambda: backward(lambda o, b: (F.mse_loss(o, b["value"]) + 1e-8).sqrt()),
    "rmse as a power": lambda: backward(lambda o, b: F.mse_loss(o, b["value"]) ** 0.5),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_answered_at_once(name: str) -> None:
    """Not at the first batch, nor with Python's own words; for this loss, not for losses in general."""
    with pytest.raises(BigBatchError) as caught:
        SLIPS[name]()
    approve("slips", name, caught.value)


def test_what_the_message_about_nanmean_says_works() -> None:
    """The line it prints is exact."""
    case = Loss("nanmean", mlp(), rows, lambda m, b: nan_mean(m(b["x"]), b), count=lambda b: float(known(b)))

    def known(batch: Batch) -> Tensor:
        return (~batch["value"].isnan()).sum()

    batches = case.micro_batches((3, 2, 4))
    for batch in batches:
        batch["value"][0, :2] = torch.nan
    training = Training(steps=3, case=case)
    for batch in training.accumulator.over(batches):
        training.accumulator.backward(case.loss(training.model, batch), count=known(batch))
    training.assert_big_batches(batches)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "step": lambda o: StepLR(o, 100),
    "sequential": lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 100)], milestones=[100]),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # torch's own, at the first
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("every", ["micro-batch", "update", "never"])
def test_a_scheduler_stepped_by_hand_is_warned_of_once(name: str, every: str) -> None:
    """A call left over from the old loop would run through the schedule too fast; a loaded state is no call."""
    model = mlp()()
    optimizer = sgd(trained(model))
    scheduler = SCHEDULERS[name](optimizer)
    accumulator = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
    scheduler.load_state_dict(scheduler.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in accumulator.over(BATCHES):
            update = accumulator.backward(PLAIN.loss(model, batch))
            if every == "micro-batch" or (every == "update" and update is not None):
                scheduler.step()
    ours = [each for each in caught if "scheduler.step() was called by hand" in str(each.message)]
    assert [each.filename for each in ours] == ([] if every == "never" else [__file__])

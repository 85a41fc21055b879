"""Frequent slips are answered with what was found and what to type."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, LRScheduler, SequentialLR, StepLR

from bigbatch import Accumulator, counted
from bigbatch.errors import ConfigurationError, SeveralCounts, UnreadableLoss
from tests.losses import SEVERAL
from tests.support.reference import sgd, trained
from tests.support.samples import Batch, Loss, mlp, rows, sequences
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


# Arguments.


NO_LOADERS: list[tuple[Any, str]] = [
    (5, r"over takes the loader, anything that yields micro-batches; found int"),
    (None, r"found NoneType"),
    (lambda: BATCHES, r"found function"),
]


@pytest.mark.parametrize(("loader", "text"), NO_LOADERS)
def test_what_is_no_loader_is_refused_at_once(loader: Any, text: str) -> None:
    """Not at the first batch, nor with Python's own words."""
    with pytest.raises(ConfigurationError, match=text) as caught:
        Training(steps=2).accumulator.over(loader)
    assert "for inputs, labels in accumulator.over(loader)" in str(caught.value)


def test_arguments_of_another_kind_are_named() -> None:
    """`64 / 16` is a float in Python; or the optimizer came first."""
    model = mlp()()
    with pytest.raises(ConfigurationError, match=r"steps must be a positive integer, .*; found 4.0"):
        Training(steps=64 / 16)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"model must be an nn.Module or a sequence of them; found SGD"):
        Accumulator(sgd(trained(model)), model, steps=2)  # type: ignore[arg-type]


# Counts in advance.


MISCOUNTED: dict[str, tuple[Callable[[Batch], tuple[Any, ...]], str]] = {
    "samples-for-tokens": (
        lambda b: (len(b["x"]), b["value"].numel()),
        r"term 1 of 2, NllLoss: counts= came to 9 .* losses to 39.*\n.*\(labels != -100\).sum\(\)",
    ),
    "samples-for-elements": (
        lambda b: ((b["labels"] != -100).sum(), len(b["x"])),
        r"term 2 of 2, MseLoss: counts= came to 9 .* losses to 216, 24 times as many.*\n.*prediction.numel\(\)",
    ),
}


@pytest.mark.parametrize("name", MISCOUNTED)
def test_a_wrong_count_names_its_term_and_the_right_one(name: str) -> None:
    """The graph knows what each term was averaged over."""
    case = Loss(
        "ce+mse",
        mlp(),
        sequences,
        lambda m, b: (
            F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()) + F.mse_loss(m(b["x"]), b["value"])
        ),
    )
    function, text = MISCOUNTED[name]
    training = Training(steps=3, case=case, counts=function)
    with pytest.raises(SeveralCounts, match=text) as caught:
        training.train(case.micro_batches((4, 2, 3)))
    assert "Nothing was stepped" in str(caught.value)
    assert "accumulator.discard()" in str(caught.value)


def test_a_wrong_count_of_a_counted_term_points_to_counted() -> None:
    """What `counted` was given is what `counts=` must return."""
    case = Loss(
        "counted",
        mlp(),
        rows,
        lambda m, b: counted(m(b["x"]).pow(2).mean(), len(b["x"])) + F.cross_entropy(m(b["x"]), b["partly"]),
    )
    training = Training(steps=2, case=case, counts=lambda b: (4 * len(b["x"]), (b["partly"] != -100).sum()))
    with pytest.raises(SeveralCounts, match=r"term 1 of 2, counted(.|\n)*the n of counted\(term, n\)"):
        training.train(case.micro_batches((4, 2)))


def test_a_batch_that_was_passed_over_is_told_from_a_wrong_count() -> None:
    """Every term came short; the first is named."""
    case = SEVERAL[0]
    training = Training(steps=3, case=case, counts=case.counts)
    batches = case.micro_batches((3, 2, 4))

    def loop() -> None:
        for batch in training.accumulator.over(batches):
            if batch is not batches[1]:
                training.backward(batch)

    with pytest.raises(SeveralCounts, match=r"term 1 of 2(.|\n)*a batch was passed over"):
        loop()


# Losses.


def nan_mean(out: Tensor, batch: Batch) -> Tensor:
    """A mean over what is known."""
    return torch.nanmean((out**2).masked_fill(batch["value"].isnan(), torch.nan))


TYPED: dict[str, tuple[Callable[[Tensor, Batch], Tensor], str]] = {
    "nanmean": (nan_mean, r"accumulator.backward(torch.nanmean(x), count=(~x.isnan()).sum())"),
    "nansum": (lambda o, b: torch.nansum(o - b["value"]), r"accumulator.backward(torch.nansum(x), count='sum')"),
    "einsum": (lambda o, b: torch.einsum("bi,bi->", o, b["value"]), "(a * b).sum()"),
    "einsum-of-two": (lambda o, _: torch.einsum("bi,bi->", o, o), "(a * b).sum()"),
    "rmse": (lambda o, b: F.mse_loss(o, b["value"]).sqrt(), "loss = F.mse_loss(prediction, target)"),
    "rmse-epsilon": (lambda o, b: (F.mse_loss(o, b["value"]) + 1e-8).sqrt(), "loss = F.mse_loss(prediction, target)"),
    "rmse-power": (lambda o, b: F.mse_loss(o, b["value"]) ** 0.5, "loss = F.mse_loss(prediction, target)"),
}


@pytest.mark.parametrize("name", TYPED)
def test_the_message_says_what_to_type(name: str) -> None:
    """For this loss, not for losses in general."""
    loss, typed = TYPED[name]
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(UnreadableLoss, match=re.escape(typed)) as caught:
        accumulator.backward(loss(model(BATCHES[0]["x"]), BATCHES[0]))
    if name.startswith("rmse"):
        assert re.search(r"nonlinear in a mean.*root of a mean", str(caught.value))
        assert "update.loss.sqrt()" in str(caught.value)


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


# A scheduler stepped twice.


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "step": lambda o: StepLR(o, 100),
    "chained": lambda o: ChainedScheduler([ConstantLR(o), LinearLR(o)]),
    "sequential": lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 100)], milestones=[100]),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # torch's own, at the first
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("every", ["micro-batch", "update"])
def test_a_scheduler_stepped_by_hand_is_warned_of_once(name: str, every: str) -> None:
    """A call left over from the old loop would run through the schedule too fast."""
    model = mlp()()
    optimizer = sgd(trained(model))
    scheduler = SCHEDULERS[name](optimizer)
    accumulator = Accumulator(model, optimizer, steps=2, scheduler=scheduler)

    def loop() -> None:
        for batch in accumulator.over(BATCHES):
            update = accumulator.backward(PLAIN.loss(model, batch))
            if update is not None or every == "micro-batch":
                scheduler.step()

    with pytest.warns(UserWarning, match=r"scheduler.step\(\) was called by hand.*Take the call out") as caught:
        loop()
    ours = [each for each in caught if "by hand" in str(each.message)]
    assert len(ours) == 1
    assert ours[0].filename == __file__


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_left_alone_is_not_warned_of(name: str) -> None:
    """Nor one whose state was loaded after the accumulator was made."""
    model = mlp()()
    optimizer = sgd(trained(model))
    scheduler = SCHEDULERS[name](optimizer)
    accumulator = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.load_state_dict(scheduler.state_dict())
        for batch in accumulator.over(BATCHES):
            accumulator.backward(PLAIN.loss(model, batch))

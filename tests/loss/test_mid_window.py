"""Losses that are none, that are refused in mid-window, or that look divided by `steps`."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.errors import LossError, SeveralCounts
from tests.support.samples import Batch
from tests.support.training import MASKED, PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


# Losses that are none.


def no_grad(model: nn.Module) -> Tensor:
    """A loss computed where gradients are off."""
    with torch.no_grad():
        return MASKED.loss(model, BATCHES[0])


NO_LOSS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "no_grad": (no_grad, r"has no graph: .*torch.no_grad\(\).*\n.*with gradients on"),
    "detached": (lambda m: MASKED.loss(m, BATCHES[0]).detach(), "has no graph"),
    "constant": (lambda _: torch.tensor(1.0), "has no graph"),
    "vector": (lambda m: m(BATCHES[0]["x"]), r"found a tensor of shape \(3, 4\)\nUse: loss.mean\(\).*reduction='mean'"),
    "empty": (lambda m: m(BATCHES[0]["x"])[:0], r"found a tensor of shape \(0, 4\)"),
    "complex": (lambda m: MASKED.loss(m, BATCHES[0]) * 1j, r"must be real; found torch.complex128\nUse: loss.real"),
    "float": (lambda m: MASKED.loss(m, BATCHES[0]).item(), r"a tensor; found float\nUse: the loss before .item\(\)"),
    "none": (lambda _: None, "the loss must be a tensor; found NoneType$"),
    "output": (
        lambda m: SimpleNamespace(loss=MASKED.loss(m, BATCHES[0]), logits=None),
        r"found SimpleNamespace\nUse: outputs.loss$",
    ),
    "mapping": (lambda m: {"loss": MASKED.loss(m, BATCHES[0])}, "found dict$"),
}


@pytest.mark.parametrize("name", NO_LOSS)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_loss_is_refused(name: str, place: int) -> None:
    """Before anything is touched: the right one may be given next."""
    make, text = NO_LOSS[name]
    training = Training(steps=3)
    for batch in BATCHES[:place]:
        training.backward(batch)
    with pytest.raises(LossError, match=text):
        training.accumulator.backward(make(training.model))
    for batch in BATCHES[place:3]:
        training.backward(batch)
    training.assert_big_batches(BATCHES[:3])


def test_a_loss_of_one_element_is_one() -> None:
    """Whatever its number of dimensions."""
    training = Training(steps=3)
    for batch in training.accumulator.over(BATCHES):
        training.accumulator.backward(MASKED.loss(training.model, batch).view(1, 1))
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


# Losses that are refused in mid-window.


def centred(model: nn.Module, batch: Batch) -> Tensor:
    """A coupled loss."""
    out = model(batch["x"])
    return (out - out.mean(0)).pow(2).mean()


def mean_and_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Two terms whose counts differ."""
    return PLAIN.loss(model, batch) + model(batch["x"]).pow(2).sum()


REFUSED: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "root": lambda m, b: PLAIN.loss(m, b).sqrt(),
    "coupled": centred,
    "several": mean_and_sum,
    "scaled": lambda m, b: m(b["x"]).sum() / 10,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_refusal_leaves_the_window_as_it_was(name: str, place: int) -> None:
    """The loss is put right and the window goes on, exact."""
    training = Training(steps=3, case=PLAIN)
    for index, batch in enumerate(training.accumulator.over(BATCHES)):
        if index == place:
            with pytest.raises(LossError):
                training.accumulator.backward(REFUSED[name](training.model, batch))
        training.backward(batch)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


@pytest.mark.parametrize("then", ["over", "steps", "other factors"])
def test_a_refused_first_loss_leaves_no_window_open(then: str) -> None:
    """A cell that failed is mended and run again: there is nothing to flush or discard, and no factor is fixed."""
    training = Training(steps=2, case=PLAIN)
    with pytest.raises(SeveralCounts):
        training.accumulator.backward(mean_and_sum(training.model, BATCHES[0]))
    if then == "over":
        training.train(BATCHES[:2])
        training.assert_big_batches(BATCHES[:2])
    elif then == "steps":
        training.accumulator.steps = 4
    else:
        out = training.model(BATCHES[0]["x"])
        training.accumulator.backward(F.mse_loss(out, BATCHES[0]["value"]) + 0.1 * out.abs().mean())


def test_a_changed_kind_of_loss_is_refused_in_mid_window() -> None:
    """A sum after a mean cannot share its correction; the window goes on with means."""
    training = Training(steps=2, case=PLAIN)
    training.backward(BATCHES[0])
    with pytest.raises(SeveralCounts, match="counts="):
        training.accumulator.backward(
            PLAIN.loss(training.model, BATCHES[1]) * 0 + training.model(BATCHES[1]["x"]).sum()
        )
    training.backward(BATCHES[1])
    training.assert_big_batches(BATCHES[:2])


# Division by `steps`.

DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda loss: loss / 4,
    "by-a-tensor": lambda loss: loss / torch.tensor(4.0),
}


@pytest.mark.parametrize("how", DIVIDED)
def test_a_loss_divided_by_steps_is_warned_of_once(how: str) -> None:
    """The textbook's division, left in: the warning points to the line and says what it comes to."""
    training = Training(steps=4, case=PLAIN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in training.accumulator.over(BATCHES):
            training.accumulator.backward(DIVIDED[how](PLAIN.loss(training.model, batch)))
    (warning,) = caught
    assert "looks divided by steps or the number of ranks (4) already" in str(warning.message)
    assert "4 times too small. Pass the undivided loss." in str(warning.message)
    assert "If you mean it, say it as a factor:  accumulator.backward(loss * 0.25)" in str(warning.message)
    assert warning.filename == __file__


NOT_DIVIDED: dict[str, tuple[int, Callable[[Tensor, Batch], Tensor]]] = {
    "a factor": (4, lambda out, b: 0.25 * F.mse_loss(out, b["value"])),
    "another number": (4, lambda out, b: F.mse_loss(out, b["value"]) / 3),
    "the mean of as many terms": (2, lambda out, b: (F.mse_loss(out, b["value"]) + F.l1_loss(out, b["value"])) / 2),
    "a sum over as many samples": (4, lambda out, b: F.kl_div(out.log_softmax(1), b["probs"], reduction="batchmean")),
    "by one": (1, lambda out, b: F.mse_loss(out, b["value"]) / 1),
}


@pytest.mark.parametrize("name", NOT_DIVIDED)
def test_other_factors_are_not_warned_of(name: str) -> None:
    """A weight of a loss is its weight."""
    steps, loss = NOT_DIVIDED[name]
    case = replace(PLAIN, loss=lambda m, b: loss(m(b["x"]), b))
    batches = micro_batches((4, 4, 4), case)
    training = Training(steps, case=case)
    training.train(batches)
    training.assert_big_batches(*(batches[start : start + steps] for start in range(0, len(batches), steps)))


def test_a_factor_of_one_may_be_there_or_not() -> None:
    """A weight that warms up ends at 1, where nothing is multiplied any more."""
    training = Training(steps=4, case=PLAIN)
    for index, batch in enumerate(training.accumulator.over(BATCHES)):
        loss = PLAIN.loss(training.model, batch)
        training.accumulator.backward(loss if index % 2 else 1.0 * loss)
    training.assert_big_batches(BATCHES[:4], BATCHES[4:])

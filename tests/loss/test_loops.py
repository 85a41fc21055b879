# ruff: noqa: E501  (a row of a table is a line)
"""Loops that look right and are not: each is exact or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch import Accumulator, errors
from tests.support.reference import TOLERANCE, distance, sgd, weights
from tests.support.samples import Batch, mlp, rows
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches((4, 4, 4), PLAIN)


def test_samples_one_by_one_without_a_batch_dimension() -> None:
    """`for x, y in dataset`: each loss is that of one sample."""
    model, true = (mlp()() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator, batch = Accumulator(model, optimizer, steps=5), rows(5, 0)
    for x, label in zip(batch["x"], batch["label"], strict=True):
        accumulator.backward(F.cross_entropy(model(x), label))
    F.cross_entropy(true(batch["x"]), batch["label"]).backward()
    torch.optim.SGD(true.parameters(), lr=0.1).step()
    assert distance(weights(model), weights(true)) <= TOLERANCE


def begun(steps: int = 2) -> Training:
    """A window with one micro-batch."""
    training = Training(steps, case=PLAIN)
    training.backward(BATCHES[0])
    return training


def regularized(training: Training) -> None:
    """Terms that come and go are different losses."""
    training.accumulator.discard()
    training.accumulator.backward(next(training.model.parameters()).pow(2).sum())
    training.backward(BATCHES[0])


def frozen(training: Training) -> None:
    """The window has that parameter's gradient already."""
    next(training.model.parameters()).requires_grad_(False)
    training.backward(BATCHES[1])


def half_converted(training: Training) -> None:
    """`over` with a leftover loss.backward() would train nothing, without a word."""
    training.accumulator.discard()
    batches = iter(training.accumulator.over(BATCHES))
    PLAIN.loss(training.model, next(batches)).backward()
    next(batches)


DISTURBED: dict[str, tuple[Callable[[Training], None], type[errors.BigBatchError], str]] = {
    "a regularizer first": (regularized, errors.LossError, "changed within a window"),
    "frozen inside a window": (frozen, errors.WindowDisturbed, "frozen inside a window"),
    "a loop that was half converted": (half_converted, errors.WindowDisturbed, r"nothing is accumulated(.|\n)*accumulator.backward\(loss\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTURBED)
def test_a_window_that_would_go_wrong_is_refused(name: str) -> None:
    """With the reason; nothing was stepped."""
    disturb, error, words = DISTURBED[name]
    training = begun()
    with pytest.raises(error, match=words):
        disturb(training)
    now, before = ([p.detach() for p in model.parameters()] for model in (training.model, PLAIN.model()))
    assert distance(now, before) == 0


def test_one_scaler_in_two_accumulators_is_exact() -> None:
    """The scale may change in mid-window, by another accumulator's update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    one, two = (Training(steps, case=PLAIN, scaler=scaler) for steps in (3, 1))
    for batch in one.accumulator.over(BATCHES):
        one.backward(batch)
        two.backward(batch)
    assert scaler.get_scale() > 4.0
    one.assert_big_batches(BATCHES)


def test_discard_leaves_the_last_batch_of_a_loop_the_last() -> None:
    """A batch that is tried again still closes its window."""
    training = Training(3, case=PLAIN)
    batches = iter(training.accumulator.over(BATCHES[:1]))
    next(batches)
    training.accumulator.discard()
    update = training.backward(BATCHES[0])
    assert update is not None
    assert update.micro_batches == 1


def test_nothing_to_train_is_refused() -> None:
    """With all parameters frozen a backward would fill other models' gradients."""
    training, other = Training(1, case=PLAIN), torch.nn.Linear(4, 4).double()
    training.model.requires_grad_(requires_grad=False)
    with pytest.raises(errors.ConfigurationError, match="nothing to train"):
        training.accumulator.backward(other(training.model(BATCHES[0]["x"])).mean())
    assert all(p.grad is None for p in other.parameters())


def test_a_refused_state_leaves_the_open_window() -> None:
    """Nothing is dropped for a state that cannot be loaded."""
    accumulator = begun().accumulator
    with pytest.raises(errors.StateError, match="not the window of an Accumulator"):
        accumulator.load_state_dict({"version": 1, "steps": 3, "window": [1]})
    assert (accumulator.steps, accumulator.remaining) == (2, 1)


def test_gradients_by_hand_are_told_from_zeroed_ones() -> None:
    """An unused parameter has no gradient, and was not set to None."""
    model: Any = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)]).double()  # the second is unused
    accumulator = Accumulator(model, sgd(list(model.parameters())), steps=3)

    def loss(batch: Batch) -> Tensor:
        return F.mse_loss(model[0](batch["x"]), batch["value"])

    accumulator.backward(loss(BATCHES[0]))
    loss(BATCHES[1]).backward()
    with pytest.raises(errors.WindowDisturbed, match="changed in place"):
        accumulator.flush()
    accumulator.discard()

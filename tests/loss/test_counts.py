"""Counts that a person gives, by `count=` or `counted`; and counts of nothing."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bigbatch import Accumulator, counted
from bigbatch.errors import LossError
from tests.support.losses import squares
from tests.support.reference import big_batches, distance, sgd, trained, weights
from tests.support.samples import Batch, Loss, mlp, sequences
from tests.support.training import MASKED, Training, micro_batches

SPLIT = (4, 1, 2, 5, 3)


def masked_mean(model: Any, batch: Batch) -> Tensor:
    """A masked mean as people write it: unreadable, and 0/0 where nothing is left."""
    return (squares(model, batch).mean(-1) * batch["mask"]).sum() / batch["mask"].sum()


BY_HAND = Loss("by-hand", mlp(), sequences, masked_mean, count=lambda b: int(b["mask"].sum()))


def train(loader: Iterable[Batch], loss: Any) -> tuple[list[Tensor], list[Any]]:
    """Train BY_HAND's model on `loss(model, batch) -> (loss, count)`; returns its weights and the updates."""
    model = BY_HAND.model()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    updates = [accumulator.backward(*loss(model, batch)) for batch in accumulator.over(loader)]
    return weights(model), [update for update in updates if update is not None]


# One count.


WAYS: dict[str, Callable[[Any, Batch], tuple[Any, ...]]] = {  # a loss, and the count that is given with it
    "tensor": lambda m, b: (masked_mean(m, b), b["mask"].sum()),
    "tensor of one element": lambda m, b: (masked_mean(m, b), b["mask"].sum().view(1, 1)),
    "float32": lambda m, b: (masked_mean(m, b), b["mask"].sum().float()),
    "int": lambda m, b: (masked_mean(m, b), int(b["mask"].sum())),
    "float": lambda m, b: (masked_mean(m, b), float(b["mask"].sum())),
    "numpy's": lambda m, b: (masked_mean(m, b), np.uint8(int(b["mask"].sum()))),
    "inside the model": lambda m, b: (0.3 * counted(masked_mean(m, b), b["mask"].sum()),),
    "a sum": lambda m, b: (0.01 * squares(m, b).sum(), "sum"),
    "once": lambda m, _: ((m[0].weight - 1).pow(2).sum(), "once"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_count_in_every_way(way: str) -> None:
    """A Python number, a tensor as `mask.sum()` is, or a word; a model may say it itself."""
    batches = BY_HAND.micro_batches(SPLIT)
    ours, updates = train(batches, WAYS[way])
    true = big_batches(replace(BY_HAND, loss=lambda m, b: WAYS[way](m, b)[0]), batches, 3)
    assert distance(ours, true.weights) <= 1e-12
    assert [float(update.loss) for update in updates] == pytest.approx(true.losses, rel=1e-12)
    if isinstance(WAYS[way](BY_HAND.model(), batches[0])[-1], int | float | Tensor) and way != "inside the model":
        assert [float(update.count) for update in updates] == true.counts


def test_a_wrong_count_is_believed() -> None:
    """It is the user's word, and the comparison can tell: nothing below it is read."""
    batches = BY_HAND.micro_batches(SPLIT)
    ours, _ = train(batches, lambda m, b: (masked_mean(m, b), len(b["x"])))
    assert distance(ours, big_batches(BY_HAND, batches, 3).weights) > 1e-3


def test_counted_takes_a_number_not_a_vector() -> None:
    """`counted` of an unreduced loss is refused, with its shape."""
    with pytest.raises(LossError, match=r"0-d tensor, a mean or a sum; found one of shape \(3, 2\)"):
        counted(torch.ones(3, 2, requires_grad=True), 3)


# Nothing to count.


@pytest.mark.parametrize("counts", [None, MASKED.count], ids=["read", "counts="])
@pytest.mark.parametrize("empty", [(0,), (2,), (1, 2), (0, 1, 3)], ids=str)
def test_a_micro_batch_of_nothing_adds_nothing(empty: tuple[int, ...], counts: Any) -> None:
    """Where every target is ignored torch's mean is 0/0: NaN, which must not spread; the rest is exact."""
    batches = micro_batches(SPLIT)
    for place in empty:
        batches[place]["partly"].fill_(-100)
    training = Training(steps=5, case=MASKED, counts=counts)
    (update,) = training.train(batches)
    assert (update.skipped, update.micro_batches) == (False, 5)
    assert float(update.loss) == pytest.approx(big_batches(MASKED, batches, 5).losses[0], rel=1e-12)
    training.assert_big_batches(batches)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_masked_mean_by_hand_with_count_0(empty: int) -> None:
    """On a CPU a count of 0 is known before the backward, which is left out: its 0/0 does no harm."""
    batches = BY_HAND.micro_batches((2, 3, 2))
    batches[empty]["mask"][:] = False
    ours, (update,) = train(batches, lambda m, b: (masked_mean(m, b), b["mask"].sum()))
    true = big_batches(BY_HAND, batches, 3)
    assert distance(ours, true.weights) <= 1e-12
    assert float(update.loss) == pytest.approx(true.losses[0], rel=1e-12)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("counts", [None, MASKED.count], ids=["read", "counts="])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_window_of_nothing_makes_no_update(optimizer: Any, counts: Any) -> None:
    """`Update.skipped` says so; the next window is as if there had been none."""
    batches = micro_batches(SPLIT)
    for batch in batches[:2]:
        batch["partly"].fill_(-100)
    training = Training(steps=2, optimizer=optimizer, clip_norm=1.0, counts=counts)
    assert training.train(batches[:2])[0].skipped
    training.assert_untouched()
    assert [update.skipped for update in training.train(batches[2:])] == [False, False]
    training.assert_big_batches(batches[2:4], batches[4:])


def test_a_window_of_nothing_leaves_the_scheduler_alone() -> None:
    """It makes no update."""
    (batch,) = micro_batches((2,))
    batch["partly"].fill_(-100)
    model = MASKED.model()
    optimizer = sgd(trained(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    Accumulator(model, optimizer, steps=1, scheduler=scheduler).backward(MASKED.loss(model, batch))
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("way", ["count", "counts", "counted"])
def test_counts_that_add_up_to_inf_are_refused(way: str) -> None:
    """Each is finite; their total would make the gradient 0."""
    model = BY_HAND.model()
    accumulator = Accumulator(
        model, sgd(trained(model)), steps=2, counts=(lambda _: 1e308) if way == "counts" else None
    )

    def train() -> None:
        for batch in accumulator.over(BY_HAND.micro_batches((2, 2))):
            loss = masked_mean(model, batch)
            accumulator.backward(*((counted(loss, 1e308),) if way == "counted" else (loss, 1e308)))

    with pytest.raises(LossError, match="add up to inf"):
        train()

"""Counts that a person gives, by `count=` or `counted`; and counts of nothing."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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


KINDS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda count: count,
    "tensor-of-one-element": lambda count: count.view(1, 1),
    "float32": lambda count: count.float(),
    "int": int,
    "float": float,
    "numpy's": lambda count: np.uint8(int(count)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_count_of_any_type(kind: str) -> None:
    """A Python number, or a tensor, as `mask.sum()` is."""
    batches = BY_HAND.micro_batches(SPLIT)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, object]:
        return masked_mean(model, batch), KINDS[kind](batch["mask"].sum())

    ours, updates = train(batches, loss)
    true = big_batches(BY_HAND, batches, 3)
    assert distance(ours, true.weights) <= 1e-12
    assert [float(update.count) for update in updates] == true.counts
    assert [float(update.loss) for update in updates] == pytest.approx(true.losses, rel=1e-12)


def test_counted_inside_the_model() -> None:
    """A model that returns its own loss may say itself what it was averaged over."""
    batches = BY_HAND.micro_batches(SPLIT)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor]:
        return (0.3 * counted(masked_mean(model, batch), batch["mask"].sum()),)

    ours, _ = train(batches, loss)
    twin = Loss("scaled", mlp(), sequences, lambda m, b: 0.3 * masked_mean(m, b))
    assert distance(ours, big_batches(twin, batches, 3).weights) <= 1e-12


@pytest.mark.parametrize("word", ["sum", "once"])
def test_count_as_a_word(word: str) -> None:
    """`count="sum"` adds up, `count="once"` takes the first."""
    batches = BY_HAND.micro_batches(SPLIT)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, str]:
        if word == "sum":
            return 0.01 * squares(model, batch).sum(), word
        return (model[0].weight - 1).pow(2).sum(), word  # type: ignore[index]  # nn.Sequential

    ours, updates = train(batches, loss)
    twin = Loss("twin", mlp(), sequences, lambda m, b: loss(m, b)[0])
    true = big_batches(twin, batches, 3)
    assert distance(ours, true.weights) <= 1e-12
    assert [float(update.loss) for update in updates] == pytest.approx(true.losses, rel=1e-12)


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


@pytest.mark.parametrize("empty", [(0,), (2,), (1, 2), (0, 1, 3)], ids=str)
def test_a_micro_batch_of_nothing_adds_nothing(empty: tuple[int, ...]) -> None:
    """Where every target is ignored torch's mean is 0/0: NaN, which must not spread; the rest is exact."""
    batches = micro_batches(SPLIT)
    for place in empty:
        batches[place]["partly"].fill_(-100)
    training = Training(steps=5)
    (update,) = training.train(batches)
    assert not update.skipped
    assert update.micro_batches == 5
    (true,) = big_batches(MASKED, batches, 5).losses
    assert float(update.loss) == pytest.approx(true, rel=1e-12)
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


def test_a_micro_batch_of_nothing_under_counts() -> None:
    """Totals known in advance make no difference: not to the gradient, nor to the loss that is told."""
    batches = micro_batches(SPLIT)
    batches[1]["partly"].fill_(-100)
    training = Training(steps=5, case=MASKED, counts=MASKED.count)
    (update,) = training.train(batches)
    training.assert_big_batches(batches)
    assert float(update.loss) == pytest.approx(big_batches(MASKED, batches, 5).losses[0], rel=1e-12)


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

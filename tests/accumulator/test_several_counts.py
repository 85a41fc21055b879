"""Losses whose terms have counts of their own: `counts=` gives their totals before the first backward."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, counted
from bigbatch.errors import LossError, SeveralCounts
from tests.support.losses import SEVERAL, kept
from tests.support.reference import accumulated, assert_equal, big_batches
from tests.support.samples import Batch, Loss, mlp, rows, sequences
from tests.support.training import Training

SPLIT = (4, 1, 2, 5, 3)
TWO_COUNTS = SEVERAL[0]  # a mean over the tokens that count, and one over all
BATCHES = TWO_COUNTS.micro_batches(SPLIT)


def test_nothing_under_a_learned_factor_is_refused() -> None:
    """The factor's gradient is the value of its term, which is 0 / 0: no weight makes it 0. Nothing is stepped."""
    model = mlp()()
    scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)

    def loss_fn(found: Any, batch: Any) -> Tensor:
        out = found(batch["x"])
        return F.cross_entropy(out, batch["partly"]) * (-scale[0]).exp() + scale[0] + F.mse_loss(out, batch["value"])

    batch = rows(6, 0)
    batch["partly"][:3] = -100
    with pytest.raises(LossError, match="0 / 0 in its gradient"):
        BigStep(model, optimizer, loss_fn, micro_batch_size=3)(batch)
    assert scale.item() == 0.0


def counting(steps: int, case: Loss = TWO_COUNTS) -> Training:
    """A training whose windows are counted in advance."""
    return Training(steps, case=case, counts=TWO_COUNTS.counts)


def test_counts_are_read_a_window_ahead_and_no_further() -> None:
    """Whatever the loader is: a stream is not drawn into memory; steps that change hold from the next window on."""
    training, given = counting(steps=1), list[int]()

    def stream() -> Iterable[Batch]:
        for place, batch in enumerate([*BATCHES, BATCHES[0]]):
            given.append(place)
            yield batch

    for batch in training.accumulator.over(stream()):
        assert len(given) <= {1: 2, 2: 4, 3: 6}[training.accumulator.steps]  # and one, for the last to be known
        if training.backward(batch) is not None:
            training.accumulator.steps = min(training.accumulator.steps + 1, 3)
    training.assert_big_batches(BATCHES[:1], BATCHES[1:3], [*BATCHES[3:], BATCHES[0]])


def test_several_counts_whose_values_are_counted() -> None:
    """Where each term carries its value, `Update.loss` is the big batch's own, and `Update.count` has them all."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        ce = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
        return counted(ce, kept(batch)) + 0.3 * counted(F.mse_loss(out, batch["value"]), batch["value"].numel())

    assert TWO_COUNTS.counts is not None
    training = counting(3, replace(TWO_COUNTS, loss=loss))
    updates = training.train(BATCHES)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:])
    true = big_batches(TWO_COUNTS, BATCHES, 3)
    assert [float(update.loss) for update in updates] == pytest.approx(true.losses, rel=1e-12)
    assert updates[1].count == TWO_COUNTS.counts(TWO_COUNTS.join(BATCHES[3:]))


def test_several_counts_whose_values_are_unknown() -> None:
    """A graph keeps the sum of the terms: the loss is their plain average, and a warning says what to write."""
    training = counting(steps=5)
    plain = sum(TWO_COUNTS.loss(training.model, batch).item() for batch in BATCHES) / len(BATCHES)
    (update,) = training.train(BATCHES)
    assert not update.loss_is_exact
    with pytest.warns(UserWarning, match=r"(?s)plain average.*counted\(ce, tokens\)"):
        assert float(update.loss) == pytest.approx(plain, rel=1e-12)
    assert "loss=about" in repr(update)


def test_counts_in_constant_ratio_need_no_totals() -> None:
    """Two means over the same samples, of different width, are as good as one count."""
    case = Loss("ratio", mlp(), sequences, lambda m, b: m(b["x"]).pow(2).mean() + m(b["x"])[:, 0].abs().mean())
    batches = case.micro_batches(SPLIT)
    assert_equal(accumulated(case, batches, 3), big_batches(case, batches, 3))


@pytest.mark.parametrize("kept_places", [(0, 2, 3, 4), (0, 1)])
def test_a_window_of_fewer_than_were_counted_is_exact_or_refused(kept_places: tuple[int, ...]) -> None:
    """One is passed over, or the loop is left: it must not pass silently."""
    training = counting(steps=5)
    window = [BATCHES[place] for place in kept_places]
    try:
        for place, batch in enumerate(training.accumulator.over(BATCHES)):
            if place > kept_places[-1]:
                break
            if place in kept_places:
                training.backward(batch)
        training.accumulator.flush()
    except SeveralCounts:
        training.accumulator.discard()
        training.assert_untouched()
    else:
        training.assert_big_batches(window)

"""Losses whose terms have counts of their own: `counts=` gives their totals before the first backward."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted
from bigbatch.errors import ConfigurationError, LossError, SeveralCounts, WindowError
from tests.support.losses import SEVERAL, kept, masked_and_mean, squares
from tests.support.reference import accumulated, assert_equal, big_batches, sgd, trained
from tests.support.samples import Batch, Loss, Tempered, mlp, rows, seeded, sequences
from tests.support.training import PLAIN, Training, micro_batches

SPLIT = (4, 1, 2, 5, 3)
TWO_COUNTS = SEVERAL[0]  # a mean over the tokens that count, and one over all


@pytest.mark.parametrize("form", ["list", "generator", "endless"])
def test_several_counts_over_any_loader(form: str) -> None:
    """`counts=` makes `over` look a window ahead, whatever the loader is."""
    batches = TWO_COUNTS.micro_batches(SPLIT)
    training = Training(steps=2, case=TWO_COUNTS, counts=TWO_COUNTS.counts)

    def endless() -> Iterable[Batch]:
        yield from batches
        while True:
            yield batches[0]

    loaders: dict[str, Iterable[Batch]] = {"list": batches, "generator": iter(batches), "endless": endless()}
    for place, batch in enumerate(training.accumulator.over(loaders[form]), start=1):
        training.backward(batch)
        if place == 4 and form == "endless":
            break
    windows = [batches[:2], batches[2:4], batches[4:]]
    training.assert_big_batches(*(windows[:2] if form == "endless" else windows))


def test_several_counts_read_no_more_than_a_window() -> None:
    """Looking ahead is bounded: a stream is not drawn into memory."""
    given: list[int] = []

    def stream() -> Iterable[Batch]:
        for place, batch in enumerate(TWO_COUNTS.micro_batches((2,) * 8)):
            given.append(place)
            yield batch

    accumulator = Training(steps=3, case=TWO_COUNTS, counts=TWO_COUNTS.counts).accumulator
    batches = iter(accumulator.over(stream()))
    next(batches)
    assert given == [0, 1, 2]


def test_several_counts_with_a_sum() -> None:
    """A sum beside a mean counts as "sum"."""
    case = Loss("sum+mean", mlp(), sequences, lambda m, b: masked_and_mean(m, b) + m(b["x"]).abs().sum())
    batches = case.micro_batches(SPLIT)
    with pytest.raises(SeveralCounts, match=r"a mean beside a sum in NllLoss.*MseLoss.*Sum \(sum\)"):
        Training(steps=3, case=case).train(batches)
    training = Training(steps=3, case=case, counts=lambda b: (kept(b), b["value"].numel(), "sum"))
    training.train(batches)
    training.assert_big_batches(batches[:3], batches[3:])


def test_several_counts_whose_values_are_counted() -> None:
    """Where each term carries its value, `Update.loss` is the big batch's own, and `Update.count` has them all."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        ce = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
        return counted(ce, kept(batch)) + 0.3 * counted(F.mse_loss(out, batch["value"]), batch["value"].numel())

    assert TWO_COUNTS.counts is not None
    training = Training(steps=3, case=replace(TWO_COUNTS, loss=loss), counts=TWO_COUNTS.counts)
    batches = TWO_COUNTS.micro_batches(SPLIT)
    updates = training.train(batches)
    training.assert_big_batches(batches[:3], batches[3:])
    true = big_batches(TWO_COUNTS, batches, 3)
    assert [float(update.loss) for update in updates] == pytest.approx(true.losses, rel=1e-12)
    assert updates[1].count == TWO_COUNTS.counts(TWO_COUNTS.join(batches[3:]))


def test_several_counts_whose_values_are_unknown() -> None:
    """A graph keeps the sum of the terms: the loss is their plain average, and a warning says what to write."""
    batches = TWO_COUNTS.micro_batches(SPLIT)
    training = Training(steps=5, case=TWO_COUNTS, counts=TWO_COUNTS.counts)
    plain = sum(TWO_COUNTS.loss(training.model, batch).item() for batch in batches) / len(batches)
    (update,) = training.train(batches)
    assert not update.loss_is_exact
    with pytest.warns(UserWarning, match=r"(?s)plain average.*counted\(ce, tokens\)"):
        assert float(update.loss) == pytest.approx(plain, rel=1e-12)
    assert "loss=about" in repr(update)


def test_counts_in_constant_ratio_need_no_totals() -> None:
    """Two means over the same samples, of different width, are as good as one count."""
    case = Loss("ratio", mlp(), sequences, lambda m, b: m(b["x"]).pow(2).mean() + m(b["x"])[:, 0].abs().mean())
    batches = case.micro_batches(SPLIT)
    assert_equal(accumulated(case, batches, 3), big_batches(case, batches, 3))


def test_steps_may_change_under_counts() -> None:
    """Each window is looked ahead at with the steps that hold when it begins."""
    batches = TWO_COUNTS.micro_batches((4, 1, 2, 5, 3, 2))
    training = Training(steps=1, case=TWO_COUNTS, counts=TWO_COUNTS.counts)
    for batch in training.accumulator.over(batches):
        if training.backward(batch) is not None:
            training.accumulator.steps += 1
    training.assert_big_batches(batches[:1], batches[1:3], batches[3:])


def test_a_batch_skipped_under_counts_is_exact_or_refused() -> None:
    """Totals were counted with the batch in them: leaving it out must not pass silently."""
    batches = TWO_COUNTS.micro_batches(SPLIT)
    training = Training(steps=5, case=TWO_COUNTS, counts=TWO_COUNTS.counts)
    try:
        for place, batch in enumerate(training.accumulator.over(batches)):
            if place != 1:
                training.backward(batch)
    except SeveralCounts:
        return
    training.assert_big_batches([batches[0], *batches[2:]])


def test_a_window_left_under_counts_is_exact_or_refused() -> None:
    """`flush` of a window whose totals were counted in advance for more."""
    batches = TWO_COUNTS.micro_batches(SPLIT)
    training = Training(steps=3, case=TWO_COUNTS, counts=TWO_COUNTS.counts)
    for batch in training.accumulator.over(batches):
        training.backward(batch)
        if batch is batches[1]:
            break
    try:
        training.accumulator.flush()
    except SeveralCounts:
        return
    training.assert_big_batches(batches[:2])


def test_counts_that_are_not_the_losses_own_are_refused() -> None:
    """The graph tells what each term was averaged over: a function that says otherwise must not pass silently."""
    training = Training(steps=5, case=TWO_COUNTS, counts=lambda batch: (len(batch["x"]), batch["value"].numel()))
    with pytest.raises(LossError):
        training.train(TWO_COUNTS.micro_batches(SPLIT))


def test_counts_outside_over_are_refused() -> None:
    """Without a wrapped loader no window can be counted in advance."""
    training = Training(steps=2, case=TWO_COUNTS, counts=TWO_COUNTS.counts)
    (batch,) = TWO_COUNTS.micro_batches((3,))
    with pytest.raises(
        WindowError, match=r"counts= needs the batches of a window in advance.*accumulator.over\(loader\)"
    ):
        training.backward(batch)
    training.assert_untouched()


def test_counts_of_changing_number_are_refused() -> None:
    """Every batch must give as many counts."""
    training = Training(steps=2, case=PLAIN, counts=lambda batch: (1,) * len(batch["x"]))
    with pytest.raises(ConfigurationError, match=r"as many counts for every batch; it returned \[3, 1\]"):
        training.train(micro_batches((3, 1)))


def test_counts_of_the_wrong_number_name_the_terms() -> None:
    """Three counts for two terms."""
    training = Training(steps=2, case=TWO_COUNTS, counts=lambda _: (1, 2, 3))
    with pytest.raises(
        SeveralCounts, match=r"are 3 counts in advance, and the loss has 2 terms over data: NllLoss.*MseLoss"
    ):
        training.train(TWO_COUNTS.micro_batches((3, 1)))
    training.accumulator.discard()
    training.assert_untouched()


def uncertainty(model: Any, batch: Batch) -> Tensor:
    """Kendall's learned weights over two terms with counts of their own, and the logarithms themselves."""
    out = model(batch["x"])
    ce = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
    return (-model.s).exp() * ce + model.s + 0.5 * (-model.t).exp() * F.mse_loss(out, batch["value"]) + 0.5 * model.t


def test_bare_parameters_beside_several_counts_are_refused() -> None:
    """They have no node of their own to carry a weight; the error says how to give them one."""
    case = Loss("uncertainty", seeded(Tempered), sequences, uncertainty)
    training = Training(steps=3, case=case, counts=lambda batch: (kept(batch), batch["value"].numel()))
    with pytest.raises(SeveralCounts, match=r"a parameter(.|\n)*counted\(term, 'once'\)"):
        training.train(case.micro_batches(SPLIT))


def test_a_bare_parameter_beside_a_sum_is_refused() -> None:
    """The same, and with what it says it is exact."""
    bare = Loss("sum-s", seeded(Tempered), rows, lambda m, b: squares(m, b).sum() - m.s)
    with pytest.raises(SeveralCounts, match=r"bare parameter(.|\n)*counted\(parameter, 'once'\)"):
        Training(steps=3, case=bare).train(bare.micro_batches(SPLIT))
    case = Loss("sum-counted", seeded(Tempered), rows, lambda m, b: squares(m, b).sum() - counted(m.s, "once"))
    training = Training(steps=3, case=case)
    batches = case.micro_batches(SPLIT)
    training.train(batches)
    training.assert_big_batches(batches[:3], batches[3:])


def test_terms_under_one_learned_factor_leave_no_place_for_two_weights() -> None:
    """A * (x + y) with different counts is refused, with what to write instead."""
    case = SEVERAL[0]
    model = nn.ModuleDict({"body": case.model(), "scale": nn.ParameterList([nn.Parameter(torch.ones(()).double())])})
    accumulator = Accumulator(model, sgd(trained(model)), steps=2, counts=case.counts)
    scale = next(iter(model["scale"].parameters()))
    batches = iter(accumulator.over(case.micro_batches((3, 2))))
    with pytest.raises(SeveralCounts, match=r"one learned factor.*\n.*a \* x \+ a \* y instead of a \* \(x \+ y\)"):
        accumulator.backward(scale.exp() * case.loss(model["body"], next(batches)))

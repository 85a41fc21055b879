"""The recipes: that they run what they say, measure what they report, and say what they measured."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch.errors import ConfigurationError
from bigbatch.memory.meter import LiveBytes
from bigbatch.recipes.arms import Comparison, Spread, Tally, compare, findings
from bigbatch.recipes.experiment import ADAMW, RECIPES, TEXTBOOK, Task, textbook_loop


@pytest.fixture(scope="module")
def textbook() -> Comparison:
    """Row 14's experiment, two seeds."""
    return compare(TEXTBOOK, seeds=2)


@pytest.fixture(scope="module")
def adamw() -> Comparison:
    """Row 15's, two seeds of three epochs."""
    return compare(ADAMW, seeds=2, epochs=3)


def test_the_experiment_is_the_pages(textbook: Comparison) -> None:
    """630 updates against 160, and 150 on 9,600 samples in the textbook's loop."""
    assert [arm.updates for arm in textbook.arms] == [630, 150, 160, 160, 160]
    assert [arm.samples_used for arm in textbook.arms] == [10_000, 9_600, 10_000, 10_000, 10_000]
    assert [arm.learning_rate for arm in textbook.arms] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.4])


def test_the_figures_are_those_measured_before(textbook: Comparison) -> None:
    """Losses and accuracies of an independent measurement with ten seeds, within what seeds differ by."""
    losses = [arm.loss.mean for arm in textbook.arms]
    assert losses == pytest.approx([0.108, 0.183, 0.178, 0.178, 0.107], abs=0.015)
    first = [arm.accuracy_first.mean for arm in textbook.arms]
    assert first == pytest.approx([0.97, 0.87, 0.88, 0.88, 0.97], abs=0.05)
    assert all(arm.accuracy_last.mean > 0.97 for arm in textbook.arms)


@pytest.mark.parametrize("name", ["textbook", "adamw"])
def test_bigbatch_ends_in_the_true_batchs_weights(name: str, request: pytest.FixtureRequest) -> None:
    """Both of its arms, with short windows, short micro-batches and clipping; the textbook's loop does not."""
    comparison: Comparison = request.getfixturevalue(name)
    assert comparison.arms[2].distance <= 1e-12
    assert comparison.arms[4].distance <= 1e-12
    assert comparison.arms[1].distance > 1e-3
    assert comparison.arms[3].distance == 0


def test_accumulating_holds_one_micro_batch_more_than_a_hand_loop(textbook: Comparison) -> None:
    """The one that `over` has looked ahead to: 16 samples of 10 features and a label, 8 bytes each."""
    assert textbook.arms[2].peak_bytes <= textbook.arms[0].peak_bytes + 16 * (10 + 1) * 8


def test_live_bytes_counts_what_lives() -> None:
    """Views and in-place results are free, what was there before is not counted, what is freed is forgotten."""
    before = torch.ones(1000)
    live = LiveBytes()
    with live:
        before.add_(1)
        first = before * 2
        second = first.view(10, 100)
        assert live.now == live.peak == 4000
        third = second + 1
        assert live.now == 8000
        del first, second
        assert live.now == 4000
        fourth = third.sum()
        del third
    assert (live.now, live.peak) == (fourth.untyped_storage().nbytes(), 8000)


def test_the_textbook_loop_is_the_textbooks() -> None:
    """Two epochs by hand: each micro-batch weighs a half, whatever its size, and each epoch's fifth is lost."""
    task = Task.of(dataclasses.replace(TEXTBOOK, samples=40), seed=0, epochs=1)
    sizes = [16, 8, 8, 4, 4]
    batches = list(zip(task.inputs.split(sizes), task.labels.split(sizes), strict=True))
    expected = nn.Linear(10, 2, dtype=torch.float64)
    expected.load_state_dict(task.model.state_dict())
    for pair in (batches[:2], batches[2:4]) * 2:
        loss = sum(cross_entropy(expected(inputs), labels) for inputs, labels in pair) / 2
        gradients = torch.autograd.grad(loss, list(expected.parameters()))  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    for _ in textbook_loop(task.model, optimizer, [batches, batches], 2, None):
        pass
    torch.testing.assert_close(task.model.state_dict(), expected.state_dict(), rtol=1e-14, atol=1e-14)


def test_a_leftover_that_is_carried_over_counts_as_used() -> None:
    """Samples used are told from the gradients, not assumed: what is cleared is lost, what is kept is late."""
    for clears, used in ((True, 4), (False, 7)):
        model = nn.Linear(10, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tally = Tally()
        tally.watch(model, optimizer)
        model(torch.ones(3, 10)).sum().backward()
        if clears:
            optimizer.zero_grad()
        model(torch.ones(4, 10)).sum().backward()
        optimizer.step()
        assert (tally.updates, tally.samples_used) == (1, used)


def test_clipping_changes_every_arm_and_no_equality(textbook: Comparison) -> None:
    """The pages' bonus: with a small norm all arms learn less, and bigbatch still equals the true batch."""
    clipped = compare(TEXTBOOK, seeds=1, clip_norm=0.05)
    assert clipped.clip_norm == 0.05
    assert all(slow.loss.mean > fast.loss.mean for slow, fast in zip(clipped.arms, textbook.arms, strict=True))
    assert clipped.arms[2].distance <= 1e-12


def test_the_textbooks_clip_meets_no_accumulated_gradient() -> None:
    """At 1.0, its bonus: the four arms of 64 go on unclipped; single batches are noisier."""
    clipped = compare(TEXTBOOK, seeds=2, clip_norm=1.0)
    assert [arm.clipped and arm.clipped.updates.mean for arm in clipped.arms[1:]] == [0, 0, 0, 0]
    assert clipped.arms[0].clipped is not None
    small = clipped.arms[0].clipped.updates.mean
    assert small > 0
    assert f"changed {small:.4g} of 630 updates in batch 16 and 0 of 160 accumulated" in findings(clipped)[2]


def test_the_same_seed_gives_the_same_numbers(textbook: Comparison) -> None:
    """Only times differ between two runs; the global random state is left alone."""
    state = torch.random.get_rng_state()
    torch.set_num_threads(2)
    again = compare(TEXTBOOK, seeds=2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == 2
    timeless = [dataclasses.replace(arm, ms_per_update=0, ms_per_epoch=0) for arm in textbook.arms]
    assert [dataclasses.replace(arm, ms_per_update=0, ms_per_epoch=0) for arm in again.arms] == timeless


def test_the_sentences_say_what_was_measured(textbook: Comparison) -> None:
    """Every figure in them is one of the comparison's."""
    lost, slower, claimed = findings(textbook)
    assert "left 40 of 1,000 samples out of every epoch, since 63 micro-batches" in lost
    assert "150 updates where the true batch makes 160" in lost
    assert f"loss of {textbook.arms[2].loss.mean:.3f} against {textbook.arms[0].loss.mean:.3f}" in slower
    assert "accumulating learns slower" in slower
    assert (
        "The teaching pages that this is from claim about 70 % validation accuracy before accumulating and 78 % after"
        in claimed
    )
    assert f"measured: {textbook.arms[0].accuracy_last.mean:.1%} before" in claimed


def test_the_sentences_follow_the_numbers_elsewhere(textbook: Comparison, adamw: Comparison) -> None:
    """A short last micro-batch is named, and slowness is not claimed where there was none."""
    assert "last micro-batch has 8 of them instead of 32" in findings(adamw)[0]
    assert "The teaching pages that this is from give no figures" in findings(adamw)[3]
    faster = dataclasses.replace(textbook.arms[2], loss=Spread(0.01, None))
    arms = (*textbook.arms[:2], faster, *textbook.arms[3:])
    assert "did not learn slower here" in findings(dataclasses.replace(textbook, arms=arms))[1]


def test_adamw_is_the_second_example(adamw: Comparison) -> None:
    """32 × 4 = 128 at 0.001, clipped at 1, rescaled by the root."""
    assert (ADAMW.features, ADAMW.classes, ADAMW.batch, ADAMW.clip_norm) == (100, 10, 128, 1.0)
    assert adamw.clip_norm == 1.0
    assert [arm.learning_rate for arm in adamw.arms] == pytest.approx([0.001, 0.001, 0.001, 0.001, 0.002])
    assert [arm.updates for arm in adamw.arms] == [96, 24, 24, 24, 24]
    assert list(RECIPES) == ["textbook", "adamw"]


def test_every_epoch_is_told_and_nothing_runs_without_one() -> None:
    """Six trainings per seed: the five shown and the true batch at the rescaled rate."""
    told: list[tuple[int, str]] = []
    compare(TEXTBOOK, seeds=2, epochs=1, on_epoch=lambda seed, arm: told.append((seed, arm)))
    assert len(told) == len(set(told)) == 12
    with pytest.raises(ConfigurationError, match="at least 1"):
        compare(TEXTBOOK, seeds=0)

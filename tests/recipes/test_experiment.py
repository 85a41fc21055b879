"""The recipes: that they run what they say, measure what they report, and say what they measured."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch.recipes.arms import Comparison, Run, compare, report
from bigbatch.recipes.experiment import ADAMW, TEXTBOOK, Task, textbook_loop


@pytest.fixture(scope="module")
def textbook() -> Comparison:
    """Row 14's experiment, two seeds."""
    return compare(TEXTBOOK, seeds=2)


@pytest.fixture(scope="module")
def adamw() -> Comparison:
    """Row 15's, two seeds of three epochs."""
    return compare(ADAMW, seeds=2, epochs=3)


def test_the_experiment_is_the_pages(textbook: Comparison) -> None:
    """630 updates against 160, and 150 on 9,600 samples in the textbook's loop; losses as ten seeds had them."""
    assert [arm.updates for arm in textbook.arms] == [630, 150, 160, 160, 160]
    assert [arm.samples_used for arm in textbook.arms] == [10_000, 9_600, 10_000, 10_000, 10_000]
    assert [arm.learning_rate for arm in textbook.arms] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.4])
    losses = [arm.loss.mean for arm in textbook.arms]
    assert losses == pytest.approx([0.108, 0.183, 0.178, 0.178, 0.107], abs=0.015)
    first = [arm.accuracy_first.mean for arm in textbook.arms]
    assert first == pytest.approx([0.97, 0.87, 0.88, 0.88, 0.97], abs=0.05)
    assert all(arm.accuracy_last.mean > 0.97 for arm in textbook.arms)
    # `over` holds the micro-batch that it has looked ahead to: 16 samples of 10 features and a label, 8 bytes each.
    assert textbook.arms[2].peak_bytes <= textbook.arms[1].peak_bytes + 16 * (10 + 1) * 8


def test_adamw_is_the_second_example(adamw: Comparison) -> None:
    """32 × 4 = 128 at 0.001, clipped at 1, rescaled by the root; a short last micro-batch is said to weigh too much."""
    assert (ADAMW.features, ADAMW.classes, ADAMW.batch, adamw.clip_norm) == (100, 10, 128, 1.0)
    assert [arm.learning_rate for arm in adamw.arms] == pytest.approx([0.001, 0.001, 0.001, 0.001, 0.002])
    assert [arm.updates for arm in adamw.arms] == [96, 24, 24, 24, 24]
    assert "weighs the last micro-batch as much as the others" in report(adamw)


@pytest.mark.parametrize("name", ["textbook", "adamw"])
def test_bigbatch_ends_in_the_true_batchs_weights(name: str, request: pytest.FixtureRequest) -> None:
    """Both of its arms, with short windows, short micro-batches and clipping; the textbook's loop does not."""
    _, naive, ours, true, rescaled = (arm.distance for arm in request.getfixturevalue(name).arms)
    assert max(ours, rescaled) <= 1e-12
    assert naive > 1e-3
    assert true == 0


def test_the_textbook_loop_is_the_textbooks() -> None:
    """Two epochs by hand: each micro-batch weighs a half, whatever its size, and each epoch's fifth is lost."""
    task, sizes = Task.of(TEXTBOOK, seed=0), [16, 8, 8, 4, 4]
    batches = list(zip(task.inputs[:40].split(sizes), task.labels[:40].split(sizes), strict=True))
    expected = nn.Linear(10, 2, dtype=torch.float64)
    expected.load_state_dict(task.model.state_dict())
    for pair in (batches[:2], batches[2:4]) * 2:
        loss = sum(cross_entropy(expected(inputs), labels) for inputs, labels in pair) / 2
        gradients = torch.autograd.grad(loss, list(expected.parameters()))  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    for _ in range(2):
        textbook_loop(task.model, optimizer, batches, 2, None)
    torch.testing.assert_close(task.model.state_dict(), expected.state_dict(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("clears", "used"), [(True, 4), (False, 7)])
def test_a_leftover_that_is_carried_over_counts_as_used(clears: bool, used: int) -> None:
    """Samples used are told from the gradients, not assumed: what is cleared is lost, what is kept is late."""
    model, run = nn.Linear(10, 2), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.watch(model, optimizer)
    model(torch.ones(3, 10)).sum().backward()
    if clears:
        optimizer.zero_grad()
    model(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    assert (run.updates, run.samples_used) == (1, used)


def test_clipping_changes_every_arm_and_no_equality(textbook: Comparison) -> None:
    """With a small norm all arms learn less, and bigbatch equals the true batch; 1.0 clips single batches alone."""
    clipped = compare(TEXTBOOK, seeds=1, clip_norm=0.05)
    assert all(slow.loss.mean > fast.loss.mean for slow, fast in zip(clipped.arms, textbook.arms, strict=True))
    assert clipped.arms[2].distance <= 1e-12
    small, *others = (arm.clipped.mean for arm in compare(TEXTBOOK, seeds=1, clip_norm=1.0).arms if arm.clipped)
    assert small > 0
    assert others == [0, 0, 0, 0]


def test_the_same_seed_gives_the_same_numbers_and_every_epoch_is_told() -> None:
    """Only times differ between two runs; the global random state and the threads are left alone.

    Six trainings per seed: the five shown and the true batch at the rescaled rate.
    """
    state = torch.random.get_rng_state()
    torch.set_num_threads(2)
    told: list[str] = []
    both = (compare(TEXTBOOK, seeds=1, epochs=2, on_epoch=told.append) for _ in range(2))
    one, other = ([dataclasses.replace(arm, ms_per_epoch=0) for arm in each.arms] for each in both)
    assert one == other
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == 2
    assert len(told) == 24

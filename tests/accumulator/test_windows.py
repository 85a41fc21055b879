"""Windows: however a loop is left or goes on, no sample is lost or counted twice."""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbatch.errors import LossError, WindowOpen
from tests.support.reference import windows
from tests.support.samples import Batch
from tests.support.samples import Loss as Case
from tests.support.strategies import seeds, splits, steps
from tests.support.training import MASKED, PLAIN, SUMMED, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


def test_steps_may_change_between_windows() -> None:
    """A growing batch, within one epoch and from one to the next."""
    training = Training(steps=2)
    for batch in training.accumulator.over(BATCHES):
        if training.backward(batch) is not None:
            training.accumulator.steps += 1
    assert training.accumulator.steps == 5
    training.assert_big_batches(BATCHES[:2], BATCHES[2:5], BATCHES[5:])


# Loops that are left early.


def leave(training: Training, after: int, how: str = "break") -> None:
    """Leave a loop after so many micro-batches."""
    for place, batch in enumerate(training.accumulator.over(BATCHES)):
        if place == after and how == "exception":
            raise KeyboardInterrupt
        if place == after:
            break
        training.backward(batch)


@pytest.mark.parametrize("how", ["break", "exception"])
def test_a_window_left_open_is_an_error_at_the_next_over(how: str) -> None:
    """The error says how much is in it and what to call; nothing is lost by it."""
    training = Training(steps=3)
    epoch = training.accumulator.over(BATCHES)
    with suppress(KeyboardInterrupt):
        leave(training, 5, how)
    for begin in (lambda: training.accumulator.over(BATCHES), lambda: next(iter(epoch))):  # wrapped before
        with pytest.raises(WindowOpen, match=r"with 2 of 3 micro-batches, left by .*\n.*flush\(\).*discard\(\)"):
            begin()
    training.accumulator.flush()
    training.assert_big_batches(BATCHES[:3], BATCHES[3:5])


def test_breaking_at_the_last_batch_before_its_backward() -> None:
    """What came before it stays open; that it was the last is forgotten."""
    training = Training(steps=4)
    leave(training, 6)
    assert training.backward(BATCHES[0]) is None
    assert training.accumulator.flush() is not None
    training.assert_big_batches(BATCHES[:4], [*BATCHES[4:6], BATCHES[0]])


# Loops within loops.


def test_accumulators_over_one_loader_with_one_that_looks_a_window_ahead() -> None:
    """`counts=` reads a window in advance; inside the others, all learn of the last batch in time."""
    counting = Training(steps=4, case=PLAIN, counts=lambda batch: batch["value"].numel())
    trainings = [counting, Training(steps=3), Training(steps=2, case=SUMMED)]
    loader: Iterable[Batch] = BATCHES
    for training in trainings:
        loader = training.accumulator.over(loader)
    for batch in loader:
        made = [training.backward(batch) is not None for training in trainings]
        assert all(made) is (batch is BATCHES[-1])
    for training, size in zip(trainings, (4, 3, 2), strict=True):
        training.assert_big_batches(*windows(BATCHES, size))


# Any loop at all.


@dataclass(frozen=True)
class Loop:
    """An epoch, and what is done after each of its micro-batches: nothing, skip it, flush, discard, or start anew."""

    sizes: list[int]
    seed: int
    steps: int
    events: list[str]


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """A loop with events strewn in."""
    sizes = draw(splits(longest=9))
    event = st.sampled_from(["go on"] * 4 + ["skip", "flush", "discard", "break and flush", "break and discard"])
    return Loop(sizes, draw(seeds), draw(steps), draw(st.lists(event, min_size=len(sizes), max_size=len(sizes))))


def grouped(batches: list[Batch], loop: Loop) -> list[list[Batch]]:
    """Which micro-batches make each update, by the rules as they are told: the reference's own bookkeeping."""
    made: list[list[Batch]] = []
    window: list[Batch] = []
    for batch, event in zip(batches, loop.events, strict=True):
        if event != "skip":
            window.append(batch)
        if len(window) == loop.steps or batch is batches[-1] or event.endswith("flush"):
            made.append(window)
            window = []
        if event.endswith("discard"):
            window = []
    return [window for window in made if window]


@given(loops())
@settings(max_examples=100)
def test_any_loop_is_its_windows(loop: Loop) -> None:
    """Skips, flushes, discards and breaks at any place, over a loader without length."""
    batches = MASKED.micro_batches(loop.sizes, loop.seed)
    training = Training(loop.steps)
    rest = list(zip(batches, loop.events, strict=True))
    while rest:
        left = len(rest)
        for place, (batch, event) in enumerate(training.accumulator.over(iter(rest)), start=1):
            if event != "skip":
                training.backward(batch)
            if event.endswith("flush"):
                training.accumulator.flush()
            if event.endswith("discard"):
                training.accumulator.discard()
            if event.startswith("break"):
                left = place
                break
        rest = rest[left:]
    training.assert_big_batches(*grouped(batches, loop))


def test_a_refused_loss_is_not_taken_for_the_one_before() -> None:
    """A loss that looks as the latest is counted on a short way; one that was refused was none of the window."""
    training, batch = Training(steps=4), BATCHES[0]

    def add(loss: Case, times: int, *, refused: bool = False) -> None:
        for _ in range(times):
            with pytest.raises(LossError, match="the loss changed within a window") if refused else nullcontext():
                training.accumulator.backward(loss.loss(training.model, batch))

    add(MASKED, 6)  # a window, and a half
    add(PLAIN, 3, refused=True)
    add(MASKED, 2)
    assert training.accumulator.remaining == 4
    training.assert_big_batches([batch] * 4, [batch] * 4)
    add(PLAIN, 1)
    training.accumulator.discard()
    for _ in range(3):  # the window before had another loss
        add(PLAIN, 1)
        add(MASKED, 1, refused=True)
    expected = PLAIN.loss(training.model, batch).item()
    update = training.accumulator.flush()
    assert update is not None
    assert (update.count, update.micro_batches) == (3 * batch["value"].numel(), 3)
    assert update.loss.item() == pytest.approx(expected, rel=1e-12)
    for place, _ in enumerate(training.accumulator.over([batch] * 3)):
        add(PLAIN, place, refused=True)
        add(MASKED, 1)  # the batch may be tried again

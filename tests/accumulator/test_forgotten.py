"""A window that nobody closed is spoken of when its accumulator goes; nothing is said where all is well."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from bigbatch.errors import UnreadableLoss
from tests.support.training import Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples
ROOT = Path(__file__).parents[2]
TEXT = r"left open with 1 of 3 micro-batches.*accumulator.flush\(\).*accumulator.discard\(\)"
pytestmark = pytest.mark.filterwarnings("default:a window was left open:UserWarning")


def left_open() -> Training:
    """A loop without `over` has ended in mid-window."""
    training = Training(steps=3)
    for batch in BATCHES[:4]:
        training.backward(batch)
    return training


def told_at_the_end(training: Training) -> list[warnings.WarningMessage]:
    """What is told when a training goes that nobody else holds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del training.accumulator
    return [each for each in caught if "left open" in str(each.message)]


def test_a_forgotten_flush_is_warned_of() -> None:
    """When the accumulator is collected, which is at once; also where it went on after it was saved."""
    (told,) = told_at_the_end(left_open())
    assert re.search(TEXT, str(told.message))
    assert Path(told.filename).name == "training.py"  # which has made the accumulator
    training = left_open()
    training.accumulator.state_dict()
    training.backward(BATCHES[4])
    (told,) = told_at_the_end(training)
    assert "with 2 of 3 micro-batches" in str(told.message)


def refused(training: Training) -> None:
    """Pass a loss that is refused inside the window."""
    model, x = training.model, BATCHES[4]["x"]
    with pytest.raises(UnreadableLoss):
        training.accumulator.backward(model(x).square().mean().sqrt())


CLEAN: dict[str, Callable[[Training], object]] = {
    "flush": lambda t: t.accumulator.flush(),
    "discard": lambda t: t.accumulator.discard(),
    "state_dict": lambda t: t.accumulator.state_dict(),
    "refused": refused,
    "full": lambda t: [t.backward(batch) for batch in BATCHES[4:6]],
    "load": lambda t: t.accumulator.load_state_dict(Training(steps=3).accumulator.state_dict()),
}


@pytest.mark.parametrize("how", CLEAN)
def test_a_clean_end_is_silent(how: str) -> None:
    """Closed, dropped, or saved to go on with."""
    training = left_open()
    CLEAN[how](training)
    assert not told_at_the_end(training)


def test_a_window_dropped_by_an_exception_is_not_spoken_of() -> None:
    """The exception says it."""

    def fails() -> None:
        training = left_open()
        message = f"out of disk with {training.accumulator.remaining} to go"
        raise OSError(message)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fails()
        except OSError as error:
            error.__traceback__ = None  # lets go of the frame, while the exception is handled
    assert not [each for each in caught if "left open" in str(each.message)]


SCRIPT = """
import torch
from bigbatch import Accumulator
model = torch.nn.Linear(3, 1)
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
accumulator.before_step(lambda: print(accumulator.steps))
accumulator.backward(model(torch.ones(2, 3)).mean())
"""


@pytest.mark.parametrize("end", ["", "raise SystemError"])
def test_the_end_of_a_program(end: str) -> None:
    """A script whose last window is open when Python exits; one that failed has said so already."""
    run = subprocess.run([sys.executable, "-c", SCRIPT + end], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ("a window was left open with 1 of 2 micro-batches" in run.stderr) is not bool(end), run.stderr
    assert run.returncode == bool(end)


def test_a_notebook_in_which_something_has_failed_before_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that was shown before the window was opened has nothing to do with it; one since has."""
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)
    assert told_at_the_end(left_open())
    training = left_open()
    monkeypatch.setattr(sys, "last_value", ValueError("just now"), raising=False)
    assert not told_at_the_end(training)

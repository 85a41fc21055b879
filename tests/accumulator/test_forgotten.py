"""A window that nobody closed is spoken of when its accumulator goes; nothing is said where all is well."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bigbatch.errors import UnreadableLoss
from tests.support.training import Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples
pytestmark = pytest.mark.filterwarnings("default:a window was left open:UserWarning")


def told_at_the_end(do: Callable[[Training], object]) -> list[warnings.WarningMessage]:
    """What is told when a training goes whose loop, without `over`, has ended in mid-window."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(steps=3)
        for batch in BATCHES[:4]:
            training.backward(batch)
        do(training)
        del training.accumulator  # nobody else holds it: it is collected at once
    return [each for each in caught if "left open" in str(each.message)]


def save_and_go_on(training: Training) -> None:
    """What was saved is of no use to the window as it is now."""
    training.accumulator.state_dict()
    training.backward(BATCHES[4])


@pytest.mark.parametrize(("do", "number"), [(id, 1), (save_and_go_on, 2)])
def test_a_forgotten_flush_is_warned_of(do: Callable[[Training], object], number: int) -> None:
    """Where the accumulator was made."""
    (told,) = told_at_the_end(do)
    text = rf"left open with {number} of 3 micro-batches.*accumulator.flush\(\).*accumulator.discard\(\)"
    assert re.search(text, str(told.message))
    assert Path(told.filename).name == "training.py"


def refused(training: Training) -> None:
    """Pass a loss that is refused inside the window."""
    with suppress(UnreadableLoss):
        training.accumulator.backward(training.model(BATCHES[4]["x"]).square().mean().sqrt())


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
    assert not told_at_the_end(CLEAN[how])


SCRIPT = """
import torch
from bigbatch import Accumulator
model = torch.nn.Linear(3, 1)
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
accumulator.before_step(lambda: print(accumulator.steps))
accumulator.backward(model(torch.ones(2, 3)).mean())
"""
FAILS = """
def fails(accumulator): raise OSError(accumulator.remaining)
try:
    fails(accumulator)
except OSError as error:
    error.__traceback__ = None
    del accumulator
"""


@pytest.mark.parametrize("end", ["", "raise SystemError"])
def test_the_end_of_a_program(end: str) -> None:
    """A script whose last window is open when Python exits; an exception, also one that was handled, says so itself."""
    code = SCRIPT + FAILS + SCRIPT + end
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.stderr.count("a window was left open with 1 of 2 micro-batches") == (not end), run.stderr
    assert run.returncode == bool(end)


@pytest.mark.parametrize("since", [False, True])
def test_a_notebook_in_which_something_has_failed(since: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that was shown before the window was opened has nothing to do with it; one since has."""
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)
    told = told_at_the_end(lambda _: since and monkeypatch.setattr(sys, "last_value", ValueError("just now")))
    assert len(told) == (not since)

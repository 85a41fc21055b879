"""A rank that raises, dies, stops or runs out of memory: all go on to the same weights, or end in time and in words."""

import pytest

from tests.faults import rank_faults
from tests.faults.outcomes import Case, Outcome

pytestmark = pytest.mark.ranks

FAULTS = [
    ("Accumulator", "ddp", "before a message", "user's own", 1002),
    ("Accumulator", "ddp", "optimizer before", "KeyboardInterrupt", 2),
    ("BigStep", "ddp", "forward", "OutOfMemoryError", 1003),
    ("BigStep", "across, again", "loss", "user's own", 5),
    ("BigStep", "batch norm", "forward", "OutOfMemoryError", 1004),
    ("BigStep", "batch norm", "after a message", "OutOfMemoryError", 4),
    ("BigStep", "batch norm", "backward", "SIGKILL", 3),
    ("BigStep", "batch norm", "in a collective", "SIGSTOP", 1005),
]


def test_a_fault_on_one_rank() -> None:
    """A sample of `make faults`, in every way in which ranks wait for each other."""
    cases = [Case("ranks", number, 0, *each) for number, each in enumerate(FAULTS)]
    found = dict(zip(FAULTS, map(rank_faults.Laboratory().try_out, cases), strict=True))
    assert found == dict.fromkeys(FAULTS, Outcome("fine"))

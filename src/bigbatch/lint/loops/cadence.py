"""How often something happens: by the moments of a window at which the conditions around it hold."""

from collections.abc import Iterable
from enum import Enum, auto

from bigbatch.lint.reading.conditions import Condition, Moment, holds
from bigbatch.lint.reading.frames import Frame, Guard
from bigbatch.lint.reading.values import Number


class Cadence(Enum):
    """How often, measured in micro-batches and windows."""

    MICRO = auto()  # with every micro-batch
    WINDOW = auto()  # at the end of each window
    START = auto()  # at the first micro-batch of each window
    ODD = auto()  # once per window, at some other place
    REST = auto()  # with every micro-batch but a window's last
    TAIL = auto()  # with the loader's last micro-batch alone
    NEVER = auto()  # under conditions that exclude each other
    BEFORE = auto()  # outside the loop
    AFTER = auto()
    UNKNOWN = auto()


_PATTERNS = {
    (True, True, True): Cadence.MICRO,
    (False, False, True): Cadence.WINDOW,
    (True, False, False): Cadence.START,
    (False, True, False): Cadence.ODD,
    (True, True, False): Cadence.REST,
}


def conditions(frames: Iterable[Frame]) -> list[Condition]:
    """Return the conditions around something."""
    return [frame.condition for frame in frames if isinstance(frame, Guard)]


def happens(around: list[Condition], moment: Moment, every: Number | None) -> bool | None:
    """Say whether all of the conditions hold at a moment; None: nobody knows."""
    known = [holds(condition, moment, every) for condition in around]
    if False in known:
        return False
    return None if None in known else True


def cadence(around: list[Condition], every: Number | None) -> Cadence:
    """Say how often something happens under conditions, in a loop whose windows hold `every` micro-batches."""
    moments = [happens(around, moment, every) for moment in (Moment.START, Moment.MIDDLE, Moment.END)]
    if None in moments:
        return Cadence.UNKNOWN
    if not any(moments):
        return Cadence.TAIL if happens(around, Moment.TAIL, every) else Cadence.NEVER
    start, middle, end = (bool(moment) for moment in moments)
    return _PATTERNS.get((start, middle, end), Cadence.UNKNOWN)

"""What a condition says about a micro-batch's place in its window.

A window is thought of in five moments. A condition is true, false or unknown at each, so `(i + 1) % n == 0`,
`not (i + 1) % n`, `i % n == n - 1` and `count == n` come to the same, and so does any mixture with `or`, `and`, `not`.
"""

from dataclasses import dataclass
from enum import Enum, auto

from bigbatch.lint.reading.places import Loop
from bigbatch.lint.reading.values import Number, Value


class Moment(Enum):
    """A micro-batch by its place in a window."""

    FIRST = auto()  # the very first one of the loop
    START = auto()  # the first of a later window
    MIDDLE = auto()
    END = auto()  # the last of a full window
    TAIL = auto()  # the loader's last one, in a window that is not full


@dataclass(frozen=True)
class Due(Value):
    """True once in `every` micro-batches: when the count of them, this one included, leaves `phase`.

    0 is the end of a window, 1 its beginning, None an unknown place.
    """

    loop: Loop | None
    every: Number
    phase: int | None
    carried: bool = False  # the count goes on from one pass over the loader to the next


@dataclass(frozen=True)
class Last(Value):
    """True at the loop's last round."""

    loop: Loop | None


@dataclass(frozen=True)
class First(Value):
    """True at the loop's first round."""

    loop: Loop | None


@dataclass(frozen=True)
class Synced(Value):
    """True when the framework says that a window is complete, the last one too."""


@dataclass(frozen=True)
class Fixed(Value):
    """A setting: the same in every round."""

    text: str
    of_steps: bool = False  # `n == 1`, `n > 1`: asks whether there is accumulation at all


@dataclass(frozen=True)
class Always(Value):
    """True or false, whatever happens."""

    holds: bool


@dataclass(frozen=True)
class Varies(Value):
    """Anything else that may change from round to round."""


@dataclass(frozen=True)
class Not(Value):
    """The opposite."""

    of: "Condition"


@dataclass(frozen=True)
class AnyOf(Value):
    """One of them is true."""

    parts: tuple["Condition", ...]


@dataclass(frozen=True)
class AllOf(Value):
    """Each of them is true."""

    parts: tuple["Condition", ...]


Condition = Due | Last | First | Synced | Fixed | Always | Varies | Not | AnyOf | AllOf


def atoms(condition: Condition) -> list[Condition]:
    """Return the parts that are not made of others."""
    match condition:
        case Not(of):
            return atoms(of)
        case AnyOf(parts) | AllOf(parts):
            return [atom for part in parts for atom in atoms(part)]
        case _:
            return [condition]


def is_setting(condition: Condition) -> bool:
    """Tell whether it is the same in every round."""
    return all(isinstance(atom, Fixed | Always) for atom in atoms(condition))


def holds(condition: Condition, moment: Moment, every: Number | None) -> bool | None:
    """Say whether it is true at a moment of a window of `every` micro-batches; None: nobody knows."""
    match condition:
        case Not(of):
            inner = holds(of, moment, every)
            return None if inner is None else not inner
        case AllOf(parts):
            return _all(parts, moment, every)
        case AnyOf(parts):
            opposite = _all(tuple(Not(part) for part in parts), moment, every)
            return None if opposite is None else not opposite
        case Due(every=number, phase=phase):
            return _due(number, phase, moment, every)
        case Always(value):
            return value
        case _:
            return _SIMPLE.get(type(condition), {}).get(moment)


_SIMPLE: dict[type, dict[Moment, bool]] = {
    Last: {moment: moment is Moment.TAIL for moment in Moment},
    First: {moment: moment is Moment.FIRST for moment in Moment},
    Synced: {moment: moment in {Moment.END, Moment.TAIL} for moment in Moment},
}
_WHEN_DUE = {0: {Moment.END}, 1: {Moment.FIRST, Moment.START}, None: {Moment.END}}


def _due(number: Number, phase: int | None, moment: Moment, every: Number | None) -> bool | None:
    if every is None or not number.same(every):
        return None  # a rhythm of its own, such as a log's
    return moment in _WHEN_DUE.get(phase, {Moment.MIDDLE})


def _all(parts: tuple[Condition, ...], moment: Moment, every: Number | None) -> bool | None:
    """Join with `and`: what asks for accumulation at all says nothing about moments, and is left out."""
    known = [holds(part, moment, every) for part in parts if not _of_steps(part)]
    if False in known:
        return False
    return None if None in known else True


def _of_steps(condition: Condition) -> bool:
    match condition:
        case Not(of):
            return _of_steps(of)
        case Fixed(of_steps=of_steps):
            return of_steps
        case _:
            return False

"""Loops, and the number of a micro-batch in its loop."""

import ast
from dataclasses import dataclass, replace
from enum import Enum, auto

from bigbatch.lint.reading.values import Number, Value


class LoopKind(Enum):
    """Where the rounds of a loop come from."""

    BATCHES = auto()  # `for batch in loader`
    COUNTED = auto()  # `for i in range(n)`
    PIECES = auto()  # the chunks, micro-batches or window that something larger was cut into
    ENDLESS = auto()  # `while True`, an iterator without an end
    FRAMEWORK = auto()  # none is seen: a framework calls this function once per micro-batch


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop, and what is known of it before its first round."""

    node: ast.AST
    kind: LoopKind
    assigned: frozenset[str]  # names that change from round to round
    targets: frozenset[str] = frozenset()
    iterable: str = ""  # as written, without enumerate and progress bars
    length: Number | None = None
    framework: str = ""  # which one, where it is one's


@dataclass(frozen=True)
class Place(Value):
    """The number of a micro-batch in its loop: how many came before it, plus `offset` (None: unknown)."""

    loop: Loop | None
    offset: int | None
    carried: bool = False  # it goes on from one pass over the loader to the next
    resets: int | None = None  # what it is set back to when a window is complete

    def shifted(self, by: int) -> "Place":
        """Return it plus a number."""
        return self if self.offset is None else replace(self, offset=self.offset + by)


@dataclass(frozen=True)
class Quotient(Value):
    """The number of a window: a place divided by a number, rounded down."""

    place: Place
    by: Number


@dataclass(frozen=True)
class Remainder(Value):
    """A place modulo a number."""

    place: Place
    of: Number

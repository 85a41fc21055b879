"""A training loop as the rules see it."""

import ast
from dataclasses import dataclass
from enum import Enum, auto

from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.reading.conditions import Due, Last, Synced, atoms
from bigbatch.lint.reading.events import Event, Kind
from bigbatch.lint.reading.frames import Guard, Setting
from bigbatch.lint.reading.places import Loop
from bigbatch.lint.reading.things import Computed
from bigbatch.lint.reading.values import Number


class Shape(Enum):
    """How a loop accumulates."""

    PLAIN = auto()  # it does not: every micro-batch is stepped
    MODULO = auto()  # it steps when a condition says that a window is full
    NESTED = auto()  # an inner loop over the micro-batches, the step after it
    FRAMEWORK = auto()  # Accelerate, Lightning or Transformers decide


class Tail(Enum):
    """What becomes of a last window that is not full."""

    DROPPED = auto()
    STEPPED = auto()
    UNKNOWN = auto()  # or there is none


@dataclass(frozen=True, eq=False)
class Fact:
    """Something that happens, and how often."""

    event: Event
    cadence: Cadence
    in_tail: bool | None  # with the loader's last micro-batch too
    at_first: bool | None  # with the very first one too

    @property
    def node(self) -> ast.AST:
        """Return the line's own syntax node."""
        return self.event.node

    def condition(self) -> ast.AST | None:
        """Return the condition on its rounds that decides whether it happens."""
        for frame in reversed(self.event.frames):
            if isinstance(frame, Guard) and any(
                isinstance(atom, Due | Last | Synced) for atom in atoms(frame.condition)
            ):
                return frame.node
        return None

    def settings(self) -> dict[str, bool]:
        """Return the settings under which it happens."""
        return {frame.text: frame.holds for frame in self.event.frames if isinstance(frame, Setting)}

    def may_meet(self, other: "Fact") -> bool:
        """Tell whether both can happen in one run: no setting is on for one and off for the other."""
        mine, theirs = self.settings(), other.settings()
        return all(theirs.get(text, holds) == holds for text, holds in mine.items())


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """A loop over micro-batches, and everything around it that belongs to it."""

    loop: Loop
    around: tuple[Loop, ...]  # the loops outside, innermost last
    shape: Shape
    every: Number | None  # micro-batches per window
    facts: tuple[Fact, ...]
    tail: Tail
    tail_node: ast.AST | None  # where the tail is stepped, or where it is forgotten

    def of(self, *kinds: Kind) -> list[Fact]:
        """Return what happens of these kinds, in the order it is written."""
        return [fact for fact in self.facts if fact.event.kind in kinds]

    def at(self, kind: Kind, *cadences: Cadence) -> list[Fact]:
        """Return what happens of a kind and as often as said."""
        return [fact for fact in self.of(kind) if fact.cadence in cadences]

    @property
    def accumulates(self) -> bool:
        """Tell whether gradients of several micro-batches are added up."""
        return self.shape is not Shape.PLAIN

    @property
    def is_seen(self) -> bool:
        """Tell whether the loop itself stands in the file."""
        return not isinstance(self.loop.node, ast.FunctionDef | ast.AsyncFunctionDef)

    def losses(self) -> list[tuple[Fact, Computed]]:
        """Return each backward of a micro-batch with what it is called on; one beside the loop is none of these."""
        inside = [fact for fact in self.of(Kind.BACKWARD) if fact.event.within(self.loop) is not None]
        return [(fact, fact.event.loss) for fact in inside if fact.event.loss is not None]

    def scaling(self, loss: Computed) -> list[Number]:
        """Return what a loss is divided by, on every way, that is the number of steps or made of it."""
        return [number for number in loss.least if self.every is not None and number.involves(self.every)]

    def steps_text(self) -> str:
        """Return the number of micro-batches per window as a reader would write it."""
        if self.every is None:
            return "n"
        known = self.every.known
        if known is not None and float(known).is_integer():
            return str(int(known))
        plus = self.every.plus
        return f"{self.every.text} {'+' if plus > 0 else '-'} {abs(plus)}" if plus else self.every.text

"""What happens in a training script, one line at a time: gradients are added, clipped, stepped with, cleared."""

import ast
from dataclasses import dataclass
from enum import Enum, auto

from bigbatch.lint.reading.frames import Frame
from bigbatch.lint.reading.places import Loop
from bigbatch.lint.reading.things import Computed
from bigbatch.lint.reading.values import Number


class Kind(Enum):
    """What happens."""

    FORWARD = auto()
    BACKWARD = auto()
    STEP = auto()  # of an optimizer
    ZERO = auto()
    CLIP = auto()
    UNSCALE = auto()
    UPDATE = auto()  # of a GradScaler
    SCHEDULER = auto()
    RESCALE = auto()  # gradients are multiplied or divided in place
    SYNC = auto()  # whether ranks talk in the next backward is set
    KEEP = auto()  # a value is added to, or put into, something that outlives the round
    HANDED_ON = auto()  # model or optimizer go to a function that is not in this file


class Via(Enum):
    """Through what it happens."""

    TORCH = auto()
    SCALER = auto()
    ACCELERATE = auto()
    FABRIC = auto()
    LIGHTNING = auto()
    TRANSFORMERS = auto()
    ENGINE = auto()


@dataclass(frozen=True, eq=False)
class Event:
    """One of them: the line, what stands around it, and whose it is."""

    kind: Kind
    node: ast.AST
    frames: tuple[Frame, ...]
    order: int
    via: Via = Via.TORCH
    subject: str = ""  # the optimizer, model, scaler as written
    loss: Computed | None = None
    divides_by: Number | None = None  # what the framework divides the loss by
    divides: bool | None = False  # whether it does; None: cannot be told
    factor: Number | None = None  # of RESCALE: what gradients are divided by
    prepared: bool | None = None  # whether Accelerate wraps it; None: cannot be told

    def loops(self) -> tuple[Loop, ...]:
        """Return the loops around it, outermost first."""
        return tuple(frame for frame in self.frames if isinstance(frame, Loop))

    def within(self, loop: Loop) -> tuple[Frame, ...] | None:
        """Return what stands around it inside a loop; None if it is not in it."""
        for place, frame in enumerate(self.frames):
            if frame is loop:
                return self.frames[place + 1 :]
        return None

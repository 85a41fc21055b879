"""What happened while the skeleton ran: a list of events, each with the rounds of the loops around it."""

import ast
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from bigbatch_lint.running.values import Loss, Opaque


class Kind(Enum):
    """What happened."""

    BACKWARD = "backward"
    STEP = "step"
    ZERO = "zero"
    CLIP = "clip"
    UNSCALE = "unscale"
    UPDATE = "update"  # of a GradScaler
    SCHEDULER = "scheduler"
    RESCALE = "rescale"  # of gradients
    KEEP = "keep"  # a loss, for later
    FORWARD = "forward"
    HANDED = "handed"  # an optimizer or scaler went into code of another file
    END = "end"  # of a pass through a loop over micro-batches

    __hash__ = object.__hash__  # an Enum's own is slow


class Via(Enum):
    """Who is asked."""

    TORCH = "torch"
    SCALER = "scaler"
    ACCELERATE = "accelerate"
    FABRIC = "fabric"
    ENGINE = "engine"
    LIGHTNING = "lightning"
    TRAINER = "trainer"


@dataclass(eq=False)
class Round:
    """One round of one pass through a loop."""

    loop: ast.AST
    number: int
    passage: int  # how often the loop was entered
    is_micro: bool = False  # the loop goes over micro-batches
    total: int | None = None
    kind: str = "loader"
    is_known: bool = False  # the file itself says how many rounds there are


@dataclass(eq=False)
class Event:
    """One thing that happened."""

    kind: Kind
    node: ast.AST
    rounds: tuple[Round, ...] = ()
    guard: ast.If | None = None  # the innermost `if` whose answer changes with the round
    contexts: tuple[Opaque, ...] = ()
    subject: str = ""
    loss: Loss = field(default_factory=Loss)
    via: Via = Via.TORCH
    divides: bool | None = False  # whether a framework divides the loss; None: nobody knows
    steps: object = None  # by how many the framework divides, where the file says so
    is_prepared: bool | None = None  # whether the object went through `prepare`; None: nobody knows
    factor: object = None  # by which gradients are divided
    has_closure: bool = False
    is_exhausted: bool = False  # of an end: the loop ended by itself

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Return what tells its rounds from all others."""
        return tuple(map(id, self.rounds))

    def micro_round(self) -> Round | None:
        """Return the round of the innermost loop over micro-batches."""
        return next((each for each in reversed(self.rounds) if each.is_micro), None)

    def is_in(self, loop: ast.AST) -> bool:
        """Tell whether it happened inside a loop."""
        return any(each.loop is loop for each in self.rounds)

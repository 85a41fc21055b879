"""What a name may stand for: the objects of a training script, and what they compute."""

import ast
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from bigbatch.lint.reading.conditions import Condition
from bigbatch.lint.reading.values import Number, Value


def computed(*origins: object, **more: Any) -> "Computed":
    """Return something new, with its graph."""
    return Computed(frozenset(origins), live=frozenset(origins), **more)


@dataclass(frozen=True)
class Computed(Value):
    """Something computed, perhaps a loss: where it comes from, and what it was divided by on the way.

    Branches may differ: `least` holds the divisors on all ways to here, `most` those on any.
    """

    origins: frozenset[object]  # names, and ids of the syntax nodes that made it
    least: tuple[Number, ...] = ()
    most: tuple[Number, ...] = ()
    reduction: str = "?"  # mean, sum, none, or unknown
    masked: ast.expr | None = None  # what tells that only some of its elements count
    live: frozenset[object] = frozenset()  # those of them whose graph it still holds
    rescaled: bool = False  # something was done to its size that cannot be told
    divided_at: tuple[ast.AST, ...] = ()
    amp: bool = False  # multiplied by a GradScaler's scale

    def divided(self, by: Number, at: ast.AST) -> "Computed":
        """Return it divided once more."""
        places = (*self.divided_at, at)
        return replace(self, least=(*self.least, by), most=(*self.most, by), divided_at=places)

    def part(self, key: object) -> "Computed":
        """Return something that was taken out of it."""
        return replace(self, origins=self.origins | {key}, live=self.live | {key} if self.live else self.live)


class Role(Enum):
    """What an object is for."""

    MODEL = auto()
    OPTIMIZER = auto()
    SCHEDULER = auto()
    SCALER = auto()
    CRITERION = auto()
    ACCELERATOR = auto()  # Hugging Face's
    FABRIC = auto()
    ENGINE = auto()  # does its own accumulating: DeepSpeed, or this library's Accumulator
    CONTEXT = auto()  # what `with` takes
    MASK = auto()
    COUNT = auto()  # how many elements a mask leaves
    GRADIENT = auto()


@dataclass(frozen=True)
class Thing(Value):
    """An object with a role."""

    role: Role
    text: str = ""
    node: ast.AST | None = None
    detail: str = ""  # a criterion's reduction, a context's role, `ddp` for a wrapped model
    masked: ast.expr | None = None
    steps: Number | None = None  # an accelerator's own, which it divides by
    condition: Condition | None = None  # of a context: when it acts
    prepared: bool = False  # by Accelerate or Fabric

"""What stands around a line: loops, conditions, settings, `with` blocks."""

import ast
from dataclasses import dataclass

from bigbatch.lint.reading.conditions import Condition
from bigbatch.lint.reading.places import Loop


@dataclass(frozen=True, eq=False)
class Guard:
    """An `if` whose condition may change from one round to the next."""

    condition: Condition
    node: ast.AST


@dataclass(frozen=True, eq=False)
class Setting:
    """An `if` on something that stays as it is while the loop runs: `if use_amp:`."""

    text: str
    holds: bool


@dataclass(frozen=True, eq=False)
class Inside:
    """A `with` block: `role` is no_sync, accumulate, no_grad or other; `subject` whose it is."""

    role: str
    subject: str
    node: ast.AST
    condition: Condition | None = None  # when it acts, where that was written


Frame = Loop | Guard | Setting | Inside

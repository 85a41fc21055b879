"""What a rule is: a code, how bad it is, and a function from a script's loops to the places where it is broken."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.facts import TrainingLoop
from bigbatch.lint.reading.program import Program


@dataclass(frozen=True)
class Script:
    """A file as the rules see it."""

    program: Program
    loops: tuple[TrainingLoop, ...]


@dataclass(frozen=True)
class Hit:
    """One place where a rule is broken, and what is wrong there."""

    node: ast.AST
    message: str


@dataclass(frozen=True)
class Rule:
    """A mistake that can be looked for; its page is docs/lint/<code>.md."""

    code: str
    slug: str
    severity: Severity
    remedy: str
    check: Callable[[Script], Iterator[Hit]]


def of_loops(check: Callable[[TrainingLoop], Iterator[Hit]]) -> Callable[[Script], Iterator[Hit]]:
    """Make a check of a script from one of a single loop that accumulates."""

    def whole(script: Script) -> Iterator[Hit]:
        for loop in script.loops:
            if loop.accumulates:
                yield from check(loop)

    return whole

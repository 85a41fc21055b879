"""A call with everything in it known as far as it can be."""

import ast
from collections.abc import Callable
from dataclasses import dataclass

from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.values import Unknown, Value
from bigbatch.lint.reading.walk import Walk

ValueOf = Callable[[Walk, ast.expr | None], Value]


@dataclass(frozen=True)
class Called:
    """A call, with everything in it known as far as it can be."""

    node: ast.Call
    name: str  # the last part of what is called
    full: str  # with the module it was imported from
    on: str  # what a method is called on, as written
    receiver: Value | None
    function: Value | None
    args: tuple[Value, ...]
    words: dict[str, Value]

    def first(self) -> Value:
        """Return the first argument."""
        return self.args[0] if self.args else next(iter(self.words.values()), Unknown())

    def first_text(self) -> str:
        """Return the first argument as written."""
        return dotted(self.node.args[0]) if self.node.args else ""

"""A call with everything in it known as far as it can be, and what fetching a value means."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from bigbatch.lint.reading.events import Kind
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.things import Computed
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


def reads(walk: Walk, node: ast.AST, value: Value) -> None:
    """Note that a computed value is fetched from the device."""
    if isinstance(value, Computed) and "fetched" not in value.origins:
        walk.emit(Kind.READ, node, loss=value)


def fetched(value: Computed) -> Computed:
    """Return a value that is on the host: reading it again costs nothing."""
    return replace(value, live=frozenset(), origins=value.origins | {"fetched"})

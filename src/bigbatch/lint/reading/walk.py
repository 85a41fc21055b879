"""Where the walk over a script is: the names it can see, what stands around it, and what happened so far."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bigbatch.lint.reading.events import Event, Kind
from bigbatch.lint.reading.frames import Frame
from bigbatch.lint.reading.places import Loop
from bigbatch.lint.reading.program import Program, dotted
from bigbatch.lint.reading.scopes import Class, Function, Scope
from bigbatch.lint.reading.things import Computed, Thing, computed
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Number, Unknown, Value
from bigbatch.lint.reading.vocabulary import LOSSES, last_part, role_of_name

STATEMENTS = 20_000  # of one file, functions counted each time they are called: what is longer is left alone
DEEP = 6  # calls of the file's own functions inside each other
# Calls whose answer stays what it is while a loop runs.
_STEADY = {"isinstance", "hasattr", "getattr", "is_available", "is_initialized", "len", "get_rank", "get_world_size"}
# Loops over parts of the model or its optimizers, which no micro-batch passes through.
_PARTS = {
    "p",
    "param",
    "params",
    "opt",
    "optimizer",
    "optim",
    "name",
    "group",
    "param_group",
    "module",
    "sched",
    "scheduler",
}


class TooLong(Exception):
    """The file asks for more steps than the walk will take."""


@dataclass(frozen=True)
class Ways:
    """How to follow a call into the file's own functions and classes, and a comprehension around its rounds."""

    enter: Callable[["Walk", Function, tuple[Value, ...], dict[str, Value]], Value]
    make: Callable[["Walk", Class, tuple[Value, ...], dict[str, Value]], Value]
    go_over: Callable[["Walk", ast.comprehension, ast.expr], Loop]


class Walk:
    """The state of a walk; what it does at a statement or an expression is said elsewhere."""

    def __init__(self, program: Program, scope: Scope, ways: Ways) -> None:
        """Begin in a module whose names are in `scope`."""
        self.program, self.scope, self._ways = program, scope, ways
        self.module = scope
        self.frames: list[Frame] = []
        self.events: list[Event] = []
        self.active: list[ast.AST] = []  # functions that are being walked through
        self.entered: set[ast.AST] = set()
        self.returned: list[list[Value]] = []
        self.carried: set[str] = set()  # counters that go on over several passes
        self.stopped: set[Loop] = set()  # loops that end after some number of rounds
        self.even = False  # the script makes sure that windows come out even
        self._statements = 0

    def enter(self, function: Function, args: tuple[Value, ...], words: dict[str, Value]) -> Value:
        """Walk through a function of the file; return what it gives."""
        return self._ways.enter(self, function, args, words)

    def make(self, of: Class, args: tuple[Value, ...], words: dict[str, Value]) -> Value:
        """Walk through the making of an object of the file's own class."""
        return self._ways.make(self, of, args, words)

    def go_over(self, generator: ast.comprehension, element: ast.expr) -> Loop:
        """Return the loop that a comprehension is."""
        return self._ways.go_over(self, generator, element)

    def count_statement(self) -> None:
        """Stop a walk that goes on for too long."""
        self._statements += 1
        if self._statements > STATEMENTS:
            raise TooLong

    @contextmanager
    def inside(self, *frames: Frame) -> Iterator[None]:
        """Walk on with something around."""
        self.frames += frames
        try:
            yield
        finally:
            if frames:
                del self.frames[-len(frames) :]

    @contextmanager
    def naming(self, scope: Scope) -> Iterator[None]:
        """Walk on with other names."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    def emit(self, kind: Kind, node: ast.AST, **more: Any) -> None:
        """Note that something happens here."""
        self.events.append(Event(kind, node, tuple(self.frames), len(self.events), **more))

    def loop(self) -> Loop | None:
        """Return the innermost loop that something passes through."""
        loops = [frame for frame in self.frames if isinstance(frame, Loop)]
        return next((loop for loop in reversed(loops) if not loop.targets & _PARTS), loops[0] if loops else None)

    def named(self, text: str) -> Value:
        """Return what a name stands for: as it was set, or as it is called."""
        return self.scope.find(text) or by_name(text)

    def varies(self, node: ast.AST) -> bool:
        """Tell whether an expression may change from one round of the loop to the next."""
        loop = self.loop()
        if loop is None:
            return False
        for each in nodes_in(node):
            text = dotted(each)
            if text and any(text == name or text.startswith((f"{name}.", f"{name}[")) for name in loop.assigned):
                return True
            if isinstance(each, ast.Call) and dotted(each.func).rpartition(".")[2] not in _STEADY:
                return True
        return False

    def number(self, value: Value, node: ast.expr) -> Number | None:
        """Return a value as an amount, if it can be one."""
        if isinstance(value, Number):
            return value
        if isinstance(value, Unknown) and value.text:
            return Number(value.text, fixed=not self.varies(node), atoms=frozenset({value.text}))
        text = dotted(node)
        if isinstance(value, Computed) and text and not value.most:  # `args.steps` of whatever `args` is
            return Number(text, fixed=not self.varies(node), atoms=frozenset({text}))
        return None


def by_name(text: str) -> Value:
    """Say what something is by nothing but its name."""
    role = role_of_name(text)
    if role is not None:
        return Thing(role, text)
    if LOSSES.search(last_part(text)):
        return computed(text)
    return Unknown(text)

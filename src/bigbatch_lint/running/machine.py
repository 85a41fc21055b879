"""The state of one run of a file's skeleton: what is bound, what is around, what has happened; and one call in it."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import PIECES, Role, counts_steps, dotted, is_loss, last_part, mentions, role_of
from bigbatch_lint.running.values import UNKNOWN, Environment, Event, Function, Items, Kind, Loss, Opaque, Round

_ENDLESS = re.compile(r"infinite|endless|forever|cycle", re.IGNORECASE)
_BUDGET = 150_000  # statements
_LARGEST = 10**12  # numbers beyond are no counters
LONGEST = 1000  # texts and lists beyond are not kept
_HELD_BACK = {"step", "zero", "scheduler"}  # by Accelerate, until its window is full
Operand = tuple[object, ast.expr]  # a value, and how it is written
_TOOLS = {"optimizer", "scheduler", "scaler", "model", "criterion", "mask"}


class Leave(Exception):
    """`break`, `continue`, `return` with its value, or the end of a run that raises."""

    def __init__(self, node: ast.AST | None = None, value: object = None) -> None:
        self.node, self.value = node, value


class Machine:
    """Names, loops and events; evaluating and calling is for the classes that build on it."""

    evaluate: Callable[[ast.expr | None, Environment], object]
    combine: Callable[[ast.AST, ast.operator, Operand, Operand], object]
    call_function: Callable[[Function, Sequence[object], Mapping[str, object]], object]

    def __init__(self, module: Module, length: int, *, settings: bool) -> None:
        self.module, self.steps, self.settings = module, module.steps, settings
        self.length = length  # of a loader that says nothing about it
        self.asked = False  # whether anything depended on settings
        self.refuses_leftover = False
        self.entered: set[ast.AST] = set()
        self.globals: set[str] = set()
        self.budget = _BUDGET
        self.begin()

    def begin(self) -> None:
        """Forget what has happened, but not what is bound."""
        self.events: list[Event] = []
        self.rounds: list[Round] = []
        self.assigned: list[frozenset[str]] = []  # what each loop around binds anew
        self.guards: list[ast.If] = []
        self.contexts: list[Opaque] = []
        self.depth = 0
        self.passages: dict[ast.AST, int] = {}

    def emit(self, kind: Kind, node: ast.AST, **notes: Any) -> Opaque:
        """Record what happens, with what is around it."""
        held = kind in _HELD_BACK and not notes.get("is_unprepared") and not self.is_synchronizing()
        if not held or all(each.context != "accumulate" for each in self.contexts):
            guard = self.guards[-1] if self.guards else None
            self.events.append(Event(kind, node, tuple(self.rounds), guard, tuple(self.contexts), **notes))
        return UNKNOWN

    def micro_round(self) -> Round | None:
        """Return the round of the innermost loop over micro-batches."""
        return next((each for each in reversed(self.rounds) if each.is_micro), None)

    def is_synchronizing(self) -> bool:
        """Tell whether a framework's window is full, or its loader at the end."""
        micro = self.micro_round()
        return micro is None or (micro.number + 1) % self.steps == 0 or micro.is_last()

    def unknown(self, text: str) -> object:
        """Return what a name stands for that nothing is bound to."""
        if counts_steps(text) or last_part(text) in self.module.moduli:
            return self.steps
        role = role_of(text)
        return Loss.of(text) if role is None and is_loss(text) else Opaque(text, role)

    def named(self, text: str, value: object) -> object:
        """Return a value that got a name: the name may say what it is for."""
        role = role_of(text)
        if not isinstance(value, Opaque):
            is_plain = isinstance(value, Loss) and (value.reduction, value.divisions, value.weight) == ("?", (), 1.0)
            return Opaque(text, role) if is_plain and role in _TOOLS else value
        if value.role is not None:
            return value if value.role in {"context", "gradient"} else replace(value, text=text)
        if role is not None:
            return replace(value, text=text, role=role, made=value.made if value.is_setting else None)
        return Loss.of((text, id(value))) if is_loss(text) else value

    def varies(self, node: ast.AST) -> bool:
        """Tell whether an expression may change from round to round."""
        names, calls = mentions(node)
        return calls or any(not names.isdisjoint(each) for each in self.assigned)

    def setting(self) -> bool:
        """Answer a question about a setting: all are on, or all are off."""
        self.asked = True
        return self.settings

    def truth(self, value: object, node: ast.AST) -> bool | None:
        """Return whether a value is true; None if nobody can know."""
        if isinstance(value, Loss):
            return None
        if not isinstance(value, Opaque):
            return isinstance(value, (Items, Function, Environment)) or bool(value)
        if value.role is not None:
            return None if value.role in {"mask", "count"} else value.made is not None or self.setting()
        return self.setting() if value.is_setting and not self.varies(node) else None

    def items_of(self, value: object, node: ast.expr) -> Items:
        """Return what a loop goes over."""
        if isinstance(value, Items):
            return value
        if isinstance(value, (list, tuple)):
            return Items(len(value), lambda k: value[k] if k < len(value) else UNKNOWN, "list", is_known=True)
        if _ENDLESS.search(" ".join(mentions(node)[0])):
            return Items(None, batch, "endless")
        cut = PIECES.search(last_part(dotted(node)))
        return Items(self.steps, batch, "pieces") if cut else Items(self.length, batch)


def batch(_: int = 0) -> Opaque:
    """Return one item of a loader."""
    return Opaque("batch", is_setting=False, made=ast.Pass())


def computed(function: Callable[..., object], *values: object) -> object:
    """Return what Python computes; something unknown where that is an error, or too large to be a counter."""
    try:
        found = function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return UNKNOWN
    too_large = isinstance(found, int | float) and not -_LARGEST < found < _LARGEST
    return UNKNOWN if too_large or (isinstance(found, (str, list, tuple)) and len(found) > LONGEST) else found


@dataclass(eq=False)
class Call:
    """A call whose arguments are computed."""

    node: ast.Call
    name: str  # `step` of `self.optimizer.step`
    full: str  # `torch.nn.functional.cross_entropy`
    on: str  # the text of what a method is called on
    receiver: object
    role: Role | None  # of the receiver
    made: ast.AST | None  # where the file has made the receiver; what `prepare` returns is of unknown making
    args: list[object]
    words: dict[str, object]
    env: Environment

    @property
    def first(self) -> object:
        """Return the first argument."""
        return self.args[0] if self.args else next(iter(self.words.values()), None)

    def argument(self, position: int, word: str) -> object:
        """Return an argument given by position or by name."""
        return self.words.get(word, self.args[position] if len(self.args) > position else None)

    def written(self, position: int) -> str:
        """Return the name that is written as an argument."""
        return dotted(self.node.args[position]) if len(self.node.args) > position else ""

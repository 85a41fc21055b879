"""The state of one run of a file's skeleton: what is bound, what is around, what has happened."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import ENDLESS, PIECES, Role, counts_steps, dotted, is_loss, last_part, role_of
from bigbatch_lint.running.trace import Event, Kind, Round
from bigbatch_lint.running.values import Class, Environment, Function, Instance, Items, Loss, Nothing, Opaque, new_loss

_BUDGET = 150_000  # statements
_HELD_BACK = {Kind.STEP, Kind.ZERO, Kind.SCHEDULER}  # by Accelerate, until its window is full


class BreakLoop(Exception):
    """`break`."""


class ContinueLoop(Exception):
    """`continue`."""


class ReturnValue(Exception):
    """`return`, or the end of a run that raises."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


class WindowsAreWhole(Exception):
    """The script refuses a leftover: it is run again with a length that leaves none."""


class OutOfBudget(Exception):
    """The skeleton runs too long."""


class Machine:
    """Names, loops and events; evaluating and calling is for the classes that build on it."""

    def __init__(self, module: Module, length: int, *, settings: bool) -> None:
        self.module = module
        self.length = length  # of a loader that says nothing about it
        self.steps = module.steps
        self.settings = settings
        self.asked = False  # whether anything depended on settings
        self.entered: set[ast.AST] = set()
        self.globals: set[str] = set()
        self.assigned: list[set[str]] = []
        self.budget = _BUDGET
        self.begin()

    def begin(self) -> None:
        """Forget what has happened, but not what is bound."""
        self.events: list[Event] = []
        self.rounds: list[Round] = []
        self.guards: list[ast.If | None] = []
        self.contexts: list[Opaque] = []
        self.depth = 0
        self.passages: dict[ast.AST, int] = {}

    # What other parts do.
    def evaluate(self, node: ast.expr | None, env: Environment) -> object:
        """Compute an expression."""
        raise NotImplementedError

    def call_function(self, function: Function, args: Sequence[object], words: Mapping[str, object]) -> object:
        """Run a function of the file."""
        raise NotImplementedError

    # Events.
    def emit(self, event: Event) -> None:
        """Note what happens, with what is around it."""
        held = event.kind in _HELD_BACK and event.is_prepared is not False
        if held and any(each.context == "accumulate" for each in self.contexts) and not self.is_synchronizing():
            return
        event.rounds = tuple(self.rounds)
        event.guard = next((guard for guard in reversed(self.guards) if guard is not None), None)
        event.contexts = tuple(self.contexts)
        self.events.append(event)

    def is_synchronizing(self) -> bool:
        """Tell whether a framework's window is full, or its loader at the end."""
        micro = next((each for each in reversed(self.rounds) if each.is_micro), None)
        return micro is None or (micro.number + 1) % self.steps == 0 or self.is_last(micro)

    @staticmethod
    def is_last(at: Round) -> bool:
        """Tell whether a round is the last of its loop."""
        return at.total is not None and at.number + 1 == at.total

    # Names.
    def unknown(self, text: str) -> object:
        """Return what a name stands for that nothing is bound to."""
        if counts_steps(text) or (self.module.moduli and last_part(text) in self.module.moduli):
            return self.steps
        role = role_of(text)
        return new_loss(text) if role is None and is_loss(text) else Opaque(text, role)

    def named(self, text: str, value: object) -> object:
        """Return a value that got a name: the name may say what it is for."""
        role = role_of(text)
        if isinstance(value, Opaque):
            if value.role in {Role.CONTEXT, Role.GRADIENT}:
                return value
            if value.role is not None:
                return replace(value, text=text)
            if role is not None:
                return replace(value, text=text, role=role, made=value.made if value.is_setting else None)
            return new_loss((text, id(value))) if is_loss(text) else value
        if isinstance(value, Loss) and value.reduction == "?" and not value.divisions and value.weight == 1.0:
            tools = {Role.OPTIMIZER, Role.SCHEDULER, Role.SCALER, Role.MODEL, Role.CRITERION, Role.MASK}
            return Opaque(text, role) if role in tools else value
        return value

    def varies(self, node: ast.AST) -> bool:
        """Tell whether an expression may change from round to round."""
        names, calls = self.module.mentions(node)
        return calls or any(not names.isdisjoint(each) for each in self.assigned)

    # Questions.
    def setting(self) -> bool:
        """Answer a question about a setting: all are on, or all are off."""
        self.asked = True
        return self.settings

    def truth(self, value: object, node: ast.AST) -> bool | None:
        """Return whether a value is true; None if nobody can know."""
        if isinstance(value, Opaque):
            return self._truth_of(value, node)
        if isinstance(value, (Loss, Nothing)):
            return None if isinstance(value, Loss) else False
        if isinstance(value, (Items, Function, Instance, Class)):
            return True
        return bool(value)

    def _truth_of(self, value: Opaque, node: ast.AST) -> bool | None:
        if value.is_remainder:
            return False
        if value.role in {Role.MASK, Role.COUNT}:
            return None
        if value.role is not None:
            return True if value.made is not None else self.setting()
        return self.setting() if value.is_setting and not self.varies(node) else None

    # Loops.
    def items_of(self, value: object, node: ast.expr) -> Items:
        """Return what a loop goes over."""
        if isinstance(value, Items):
            return value
        if isinstance(value, (list, tuple, dict, str)):
            listed = list(value)
            return Items(
                len(listed), lambda k: listed[k] if k < len(listed) else Opaque(is_setting=False), "list", is_known=True
            )
        text = self.module.text(node)
        return self._unknown_items(value, node, text)

    def _unknown_items(self, value: object, node: ast.expr, text: str) -> Items:

        name = last_part(dotted(node))
        if ENDLESS.search(text):
            return Items(None, lambda k: new_loss(("batch", k)), "endless", text)
        item: Callable[[int], object] = (lambda k: new_loss((text, k))) if isinstance(value, Loss) else batch
        if PIECES.search(name) and dotted(node):
            return Items(self.steps, item, "pieces", text)
        return Items(self.length, item, "loader", text)


def batch(_: int = 0) -> Opaque:
    """Return one item of a loader."""
    return Opaque("batch", is_setting=False, made=ast.Pass())

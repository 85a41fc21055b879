"""One call, as those see it that know what it does."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bigbatch_lint.reading.names import Role
from bigbatch_lint.running.machine import Machine
from bigbatch_lint.running.values import Environment, Loss, Opaque, new_loss


class _Unknown:
    """The answer of those that know nothing of a call."""


UNKNOWN = _Unknown()


@dataclass(eq=False)
class Call:
    """A call whose arguments are computed."""

    node: ast.Call
    name: str  # `step` of `self.optimizer.step`
    full: str  # `torch.nn.functional.cross_entropy`
    on: str  # the text of what a method is called on
    receiver: object
    args: list[object]
    words: dict[str, object]
    env: Environment

    @property
    def first(self) -> object:
        """Return the first argument."""
        return self.args[0] if self.args else next(iter(self.words.values()), None)

    @property
    def role(self) -> Role | None:
        """Return what the receiver is for."""
        return self.receiver.role if isinstance(self.receiver, Opaque) else None

    def argument(self, position: int, word: str) -> object:
        """Return an argument given by position or by name."""
        return self.words.get(word, self.args[position] if len(self.args) > position else None)

    def constant(self, word: str) -> object:
        """Return a keyword's value as it is written."""
        given = next((each.value for each in self.node.keywords if each.arg == word), None)
        return given.value if isinstance(given, ast.Constant) else None


Handler = Callable[[Machine, Call], object]
_Any = TypeVar("_Any", bound=Handler)


class Table(dict[str, Handler]):
    """What calls do, by their last name."""

    def on(self, names: str) -> Callable[[_Any], _Any]:
        """Register a function for calls of these names."""

        def register(handler: _Any) -> _Any:
            self.update(dict.fromkeys(names.split(), handler))
            return handler

        return register

    def __call__(self, machine: Machine, call: Call) -> object:
        """Handle a call; UNKNOWN if nobody can."""
        handler = self.get(call.name)
        return UNKNOWN if handler is None else handler(machine, call)


def as_loss(value: object) -> Loss:
    """Return a value as the tensor that it must be where it is given."""
    return value if isinstance(value, Loss) else new_loss(getattr(value, "text", "") or id(value))

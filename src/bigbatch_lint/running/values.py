"""What the interpreter computes with, besides Python's own numbers, texts, tuples, lists and dicts."""

import ast
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from bigbatch_lint.reading.names import Role

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
NUMBERS = (int, float)
PLAIN = (int, float, str, bool, type(None))


@dataclass(eq=False, slots=True)
class Opaque:
    """A thing without a value: a model, an optimizer, a setting, a batch."""

    text: str = ""
    role: Role | None = None
    is_setting: bool = True  # the same in every round of the loop
    made: ast.AST | None = None  # the call that made it, where that was seen
    context: str = ""  # of a `with`: no_sync, accumulate, no_grad, inference_mode, nullcontext
    reduction: str = ""  # of a criterion
    masked: ast.AST | None = None
    steps: object = None  # of an Accelerator: how many micro-batches it was made for
    is_prepared: bool = False
    is_remainder: bool = False  # of something unknown: rarely zero


@dataclass(frozen=True)
class Division:
    """One division of a loss."""

    value: float | None
    text: str
    node: ast.AST
    is_weight: bool = False  # `0.5 * loss` and `(a + b) / 2` are a loss of their own


@dataclass(eq=False, slots=True)
class Loss:
    """A tensor that a loss may be made of: what it comes from, and what it was divided by."""

    origins: frozenset[Hashable] = frozenset()
    weight: float | None = 1.0  # of one mean loss; None where it cannot be computed
    divisions: tuple[Division, ...] = ()
    reduction: str = "?"
    masked: ast.AST | None = None  # where a mean over a varying number of targets was taken
    live: frozenset[Hashable] = frozenset()  # the origins whose graph it keeps
    is_scaled: bool = False  # by a GradScaler

    def divided(self, division: Division) -> "Loss":
        """Return the loss after a division."""
        known = self.weight is not None and division.value
        weight = self.weight / division.value if known and self.weight is not None and division.value else None
        return replace(self, weight=weight, divisions=(*self.divisions, division))

    def unknown_weight(self) -> "Loss":
        """Return the loss after a factor that nobody can compute."""
        return replace(self, weight=None)

    def part(self, origin: Hashable) -> "Loss":
        """Return a part of the tensor: an item, an attribute."""
        return replace(self, origins=self.origins | {origin}, live=self.live | {origin} if self.live else self.live)

    def item(self, number: int, count: int) -> "Loss":
        """Return one of several tensors that came together: what is kept of one keeps none of the others."""
        origins = frozenset((each, number, count) for each in self.origins)
        return replace(self, origins=origins, live=origins if self.live else self.live)

    def detached(self) -> "Loss":
        """Return the loss without its graph."""
        return replace(self, live=frozenset())


def new_loss(origin: Hashable, *, reduction: str = "?", masked: ast.AST | None = None) -> Loss:
    """Return a tensor that comes from one place."""
    origins = frozenset((origin,))
    return Loss(origins, reduction=reduction, masked=masked, live=origins)


@dataclass(eq=False)
class Items:
    """Something to loop over."""

    length: int | None  # None: endless
    item: Callable[[int], object]
    kind: str = "loader"  # loader, range, list, pieces, endless, dataset
    text: str = ""
    is_known: bool = False  # the file itself says how long it is
    taken: int = 0  # by next()

    def next(self) -> object:
        """Return the next item, starting anew at the end."""
        self.taken += 1
        return self.item((self.taken - 1) % self.length if self.length else self.taken - 1)


@dataclass(eq=False)
class Class:
    """A class of the file."""

    node: ast.ClassDef
    env: "Environment"


@dataclass(eq=False)
class Instance:
    """An object of a class of the file."""

    cls: Class
    attributes: dict[str, object] = field(default_factory=dict)


@dataclass(eq=False)
class Function:
    """A function of the file; a method is bound to its object."""

    node: FunctionNode
    env: "Environment"
    owner: Instance | None = None


class Environment(dict[str, object]):
    """Names, also dotted ones, and what they are bound to; what is not here is looked up outside."""

    def __init__(self, outer: "Environment | None" = None) -> None:
        super().__init__()
        self.outer = outer

    def find(self, name: str) -> object:
        """Return what a name is bound to; None if it is not."""
        scope: Environment | None = self
        while scope is not None:
            if name in scope:
                return scope[name]
            scope = scope.outer
        return None

    def holder(self, name: str) -> "Environment | None":
        """Return the innermost scope that binds a name."""
        scope: Environment | None = self
        while scope is not None and name not in scope:
            scope = scope.outer
        return scope


class Nothing:
    """The None that `next(batches, None)` returns at the end; a plain None in a file is often a setting."""


NOTHING = Nothing()

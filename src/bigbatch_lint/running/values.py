"""What the interpreter computes with, besides Python's own numbers, texts, tuples, lists and dicts; what it records."""

import ast
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from bigbatch_lint.reading.names import Role

PLAIN = (int, float, str, bool, type(None))
# "update" is of a GradScaler, "rescale" of gradients; "keep" holds on to a loss; "handed" gives an optimizer or scaler
# to code of another file; "end" is of a pass through a loop over micro-batches.
Kind = Literal[
    "backward", "step", "zero", "clip", "unscale", "update", "scheduler", "rescale", "keep", "forward", "handed", "end"
]
Via = Literal["torch", "scaler", "accelerator", "engine", "lightning"]  # who is asked


@dataclass(eq=False, slots=True)
class Opaque:
    """A thing without a value: a model, an optimizer, a setting, a batch."""

    text: str = ""
    role: Role | None = None
    is_setting: bool = True  # the same in every round of the loop
    made: ast.AST | None = None  # the call that made it, where that was seen
    context: str = ""  # of a `with`: no_sync, accumulate, no_grad, inference_mode, nullcontext
    reduction: str = "?"  # of a criterion
    masked: ast.AST | None = None
    steps: object = None  # of an Accelerator: how many micro-batches it was made for


UNKNOWN = Opaque(is_setting=False)  # it may be another thing in each round


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

    origins: frozenset[Hashable] = frozenset()  # of the graph that it keeps; none where it is detached
    weight: float | None = 1.0  # of one mean loss; None where it cannot be computed
    divisions: tuple[Division, ...] = ()
    reduction: str = "?"
    masked: ast.AST | None = None  # where a mean over a varying number of targets was taken
    is_scaled: bool = False  # by a GradScaler

    @classmethod
    def of(cls, origin: Hashable, *, reduction: str = "?", masked: ast.AST | None = None) -> "Loss":
        """Return a tensor that comes from one place."""
        return cls(frozenset((origin,)), reduction=reduction, masked=masked)

    @classmethod
    def given(cls, value: object) -> "Loss":
        """Return a value as the tensor that it must be where it is given."""
        return value if isinstance(value, Loss) else cls.of(getattr(value, "text", "") or id(value))

    @classmethod
    def sum_of(cls, parts: list["Loss"]) -> "Loss":
        """Return the sum of tensors: divided as often as that part which was divided most."""
        most = max(parts, key=lambda part: len(part.divisions))
        return replace(
            most,
            origins=frozenset().union(*(part.origins for part in parts)),
            reduction=most.reduction if len({part.reduction for part in parts}) == 1 else "?",
            masked=next((part.masked for part in parts if part.masked is not None), None),
            is_scaled=any(part.is_scaled for part in parts),
        )

    def divided(self, division: Division) -> "Loss":
        """Return the loss after a division."""
        weight = self.weight / division.value if self.weight is not None and division.value else None
        return replace(self, weight=weight, divisions=(*self.divisions, division))

    def part(self, origin: Hashable) -> "Loss":
        """Return a part of the tensor: an item, an attribute; or the tensor, kept under another name."""
        return replace(self, origins=self.origins | {origin}) if self.origins else self


@dataclass(eq=False)
class Items:
    """Something to loop over."""

    length: int | None  # None: endless
    item: Callable[[int], object]
    kind: str = "loader"  # loader, range, list, pieces, batched, endless, dataset
    is_known: bool = False  # the file itself says how long it is
    taken: int = 0  # by next()


class Environment(dict[str, object]):
    """Names, also dotted ones, and what they are bound to; what is not here is looked up outside.

    An object of a class of the file is one, too: it holds the names that begin with `self`.
    """

    def __init__(self, outer: "Environment | None" = None, cls: ast.ClassDef | None = None) -> None:
        super().__init__()
        self.outer, self.cls = outer, cls

    def find(self, name: str) -> object:
        """Return what a name is bound to; None if it is not."""
        return self[name] if name in self else self.outer.find(name) if self.outer is not None else None

    def bind(self, name: str, value: object, *, outside: bool = False) -> None:
        """Bind a name here; an attribute in its object; where it is bound outside, as `global` and `nonlocal` say."""
        scope: Environment | None = self
        is_own = name.startswith("self.")
        while scope is not None and ((outside and name not in scope) or (is_own and scope.cls is None)):
            scope = scope.outer
        (self if scope is None else scope)[name] = value


@dataclass(eq=False)
class Function:
    """A function of the file; a method is bound to its object."""

    node: ast.FunctionDef | ast.Lambda
    env: Environment
    owner: Environment | None = None


@dataclass(eq=False)
class Round:
    """One round of one pass through a loop."""

    loop: ast.AST
    number: int = 0
    passage: int = 1  # how often the loop was entered
    is_micro: bool = False  # the loop goes over micro-batches
    total: int | None = None
    kind: str = "loader"
    is_known: bool = False  # the file itself says how many rounds there are

    def is_last(self) -> bool:
        """Tell whether it is the last one of its loop."""
        return self.total is not None and self.number + 1 == self.total


@dataclass(eq=False)
class Event:
    """One thing that happened, with what was around it."""

    kind: Kind
    node: ast.AST
    rounds: tuple[Round, ...] = ()
    guard: ast.If | None = None  # the innermost `if` whose answer changes with the round
    contexts: tuple[Opaque, ...] = ()
    subject: str = ""
    loss: Loss = field(default_factory=Loss)
    via: Via = "torch"
    divides: bool | None = False  # whether a framework divides the loss; None: nobody knows
    steps: object = None  # by how many the framework divides, where the file says so
    is_unprepared: bool = False  # by a framework: the file makes the object, and calls it as it is
    factor: object = None  # by which gradients are divided
    has_closure: bool = False
    is_exhausted: bool = False  # of an end: the loop ended by itself

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Return what tells its rounds from all others."""
        return tuple(map(id, self.rounds))

    def round_of(self, loop: ast.AST) -> Round | None:
        """Return the round of a loop in which it happened."""
        return next((each for each in self.rounds if each.loop is loop), None)

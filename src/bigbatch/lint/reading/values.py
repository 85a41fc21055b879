"""What a name may stand for, as far as it can be told without running anything; here, the plain ones."""

import ast
from dataclasses import dataclass


class Value:
    """Anything that a name may stand for."""


@dataclass(frozen=True)
class Unknown(Value):
    """Nothing is known but how it is written, if it is a plain name."""

    text: str = ""


@dataclass(frozen=True)
class Number(Value):
    """An amount, known or not: `text + plus`, such as `len(loader) - 1`."""

    text: str
    value: float | None = None
    plus: int = 0
    fixed: bool = True  # it stays as it is while the loop runs
    atoms: frozenset[str] = frozenset()  # the names it is made of

    @property
    def known(self) -> float | None:
        """Its amount, where it is known."""
        return None if self.value is None else self.value + self.plus

    def same(self, other: "Number") -> bool:
        """Tell whether both are one amount; `args.steps` and a parameter `steps` count as one."""
        if self.known is not None and other.known is not None:
            return self.known == other.known
        return self.plus == other.plus and _last(self.text) == _last(other.text)

    def involves(self, other: "Number") -> bool:
        """Tell whether it is, or is made of, the other: `steps * world_size` of `steps`."""
        names = {_last(name) for name in self.atoms | {self.text}}
        return self.same(other) or _last(other.text) in names


def _last(text: str) -> str:
    return text.rpartition(".")[2].strip("_")


@dataclass(frozen=True)
class Inverse(Value):
    """One over a number: a factor that divides."""

    of: Number


@dataclass(frozen=True)
class Rows(Value):
    """Something with a length: a tensor's rows, a dataset's samples, a loader's batches."""

    count: int | None
    cut: bool = False  # it holds the pieces of something larger
    endless: bool = False


@dataclass(frozen=True, eq=False)
class Numbered(Value):
    """What `enumerate` gives, also inside a progress bar: the call is read again by the loop that goes over it."""

    call: ast.Call


@dataclass(frozen=True)
class Several(Value):
    """A tuple."""

    items: tuple[Value, ...]

"""A function of torch that is ours for a while, for all who ask for it at once, from whatever thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_Function = Callable[..., Any]


@contextmanager
def swapped(*swaps: "Swap") -> Iterator[None]:
    """Want all of these inside. An interrupt, wherever it comes, leaves none of them behind."""
    who = object()
    with ExitStack() as stack:
        for swap in swaps:
            stack.callback(swap.leave, who)
            stack.callback(swap.leave, who)  # once more: an interrupt may have kept the first from it
            swap.enter(who)
        yield


class Swap:
    """Puts one function in the place of another while anyone wants it there; the last one to leave puts it back.

    Several swaps of one function lie one upon the other, and go in whatever order.
    """

    def __init__(self, module: Any, name: str, make: Callable[[_Function], _Function]) -> None:
        """Change nothing yet; `make` gives the new function, of the plain one."""
        self._make, self._users = make, list[object]()
        self._place = _places.setdefault((id(module), name), _Place(module, name))
        self.plain: _Function = getattr(module, name)
        self._made: tuple[_Function, _Function] | None = None  # a plain one, and what was made of it

    def enter(self, who: object = None) -> None:
        """Want it."""
        with _lock:
            self._users.append(who)
            self._place.settle(self, wanted=True)

    def leave(self, who: object = None) -> None:
        """Want it no more; once more does no harm, where it is known `who` did."""
        with _lock:
            if who in self._users:
                self._users.remove(who)
            self._place.settle(self, wanted=bool(self._users))

    def upon(self, plain: _Function) -> _Function:
        """Return what takes the place of a function; the same again for the same one."""
        self.plain = plain
        if self._made is None or self._made[0] is not plain:
            self._made = plain, self._make(plain)
        return self._made[1]


class _Place:
    """A name in a module, and the swaps that are in force there, the lowest first."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name
        self._own: _Function | None = None  # what is there without any
        self._layers: list[Swap] = []

    def settle(self, swap: Swap, *, wanted: bool) -> None:
        """Put there what belongs there. Where an interrupt ends it, the next one makes up for it."""
        if self._own is None:
            self._own = getattr(self._module, self._name)  # as it is now: others may have put theirs there
        if (swap in self._layers) != wanted:
            (self._layers.append if wanted else self._layers.remove)(swap)
        function: Any = self._own
        for layer in self._layers:
            function = layer.upon(function)
        setattr(self._module, self._name, function)
        if not self._layers:
            self._own = None


_lock = threading.RLock()  # a generator that is closed while garbage is collected may come back here
_places: dict[tuple[int, str], _Place] = {}

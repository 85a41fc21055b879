"""A function of torch that is ours for a while, for all who ask for it at once, from whatever thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_Function = Callable[..., Any]
_lock = threading.RLock()  # a generator that is closed while garbage is collected may come back here
_places: "dict[tuple[int, str], tuple[_Function, list[Swap]]]" = {}  # what is there without us; the swaps in force


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
        self._module, self._name, self._make = module, name, make
        self._users = list[object]()
        self.plain: _Function = getattr(module, name)
        self._made: tuple[_Function, _Function] | None = (
            None  # a plain one, and what was made of it, once: compilers know it
        )

    def enter(self, who: object = None) -> None:
        """Want it."""
        with _lock:
            self._users.append(who)
            self._settle()

    def leave(self, who: object = None) -> None:
        """Want it no more."""
        with _lock:
            if who in self._users:
                self._users.remove(who)
            self._settle()

    def _settle(self) -> None:
        place = (id(self._module), self._name)
        function, layers = _places.setdefault(place, (getattr(self._module, self._name), []))
        if (self in layers) != bool(self._users):
            (layers.append if self._users else layers.remove)(self)
        for layer in layers:
            function = layer._upon(function)  # noqa: SLF001 - of this class
        setattr(self._module, self._name, function)
        if not layers:
            del _places[place]

    def _upon(self, plain: _Function) -> _Function:
        self.plain = plain
        if self._made is None or self._made[0] is not plain:
            self._made = plain, self._make(plain)
        return self._made[1]

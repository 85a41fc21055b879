"""A function of torch that is ours for a while, for all who ask for it at once, from whatever thread."""

import threading
from collections.abc import Callable
from typing import Any


class Swap:
    """Puts one function in the place of another while anyone wants it there; the last one to leave puts it back."""

    def __init__(self, module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Change nothing yet; `make` gives the new function, of the plain one."""
        self._module, self._name, self._make = module, name, make
        self._users, self._lock = 0, threading.Lock()
        self.plain: Callable[..., Any] = getattr(module, name)

    def enter(self) -> None:
        """Want it."""
        with self._lock:
            if not self._users:
                self.plain = getattr(self._module, self._name)  # as it is now: others may have put theirs there
                setattr(self._module, self._name, self._make(self.plain))
            self._users += 1

    def leave(self) -> None:
        """Want it no more."""
        with self._lock:
            self._users -= 1
            if not self._users:
                setattr(self._module, self._name, self.plain)

"""What a model's run finds in its buffers, and changes there: a second run finds the same, and leaves no trace.

A vector of a spectral norm, a running centre: one micro-batch after the other moves it, and in backward it is where the
last one has left it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

Place = tuple[int, str]  # the id of a module, and a name


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor | None
    version: int

    @property
    def place(self) -> Place:
        return id(self.module), self.name

    @property
    def is_replaced(self) -> bool:
        return self.module._buffers.get(self.name) is not self.tensor  # noqa: SLF001 - those that are not saved, too

    @property
    def is_written(self) -> bool:
        """Whether a run has written into it, or may have without a new version."""
        if self.tensor is None:
            return False
        of_its_own = isinstance(self.module, Statistics) and self.module.training
        return of_its_own or self.tensor._version != self.version  # noqa: SLF001 - torch's own counter


class FoundBefore:
    """The buffers of a model's modules before a run."""

    def __init__(self, modules: Iterable[nn.Module], moving: frozenset[Place] | None) -> None:
        """Copy those that will be written into; all of them, where that is not known."""
        self._found = [
            _Buffer(module, name, tensor, 0 if tensor is None else tensor._version)  # noqa: SLF001
            for module in modules
            for name, tensor in module._buffers.items()  # noqa: SLF001
        ]
        self._copies = {
            id(each.tensor): each.tensor.detach().clone()
            for each in self._found
            if each.tensor is not None and (moving is None or each.place in moving)
        }

    def written(self) -> frozenset[Place]:
        """Return where the run has written."""
        return frozenset(each.place for each in self._found if each.is_written)

    def settle(self) -> bool:
        """Keep what a second run needs; returns whether all of it is there."""
        self._found = [each for each in self._found if each.is_written or each.is_replaced]
        kept = {id(each.tensor) for each in self._found}
        self._copies = {key: copied for key, copied in self._copies.items() if key in kept}
        return all(id(each.tensor) in self._copies for each in self._found if each.is_written)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put all of them where they were before the run, and afterwards where they are now."""
        now = [(each, each.module._buffers.get(each.name)) for each in self._found]  # noqa: SLF001
        # Copies of copies: backward may need what the run has read, and they may be asked for again.
        fresh = {key: copied.clone() for key, copied in self._copies.items()}
        for each in self._found:
            each.module._buffers[each.name] = fresh.get(id(each.tensor), each.tensor)  # noqa: SLF001
        try:
            yield
        finally:
            for each, tensor in now:
                each.module._buffers[each.name] = tensor  # noqa: SLF001

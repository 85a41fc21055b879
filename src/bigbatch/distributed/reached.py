"""What a backward reaches: noted by the versions of gradients, or filled with zeros."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bigbatch.distributed.fsdp_internals import held


class Reached:
    """Which of some parameters a backward has added a gradient to."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Look at their gradients, before it. They are held, so that no new one can take an old one's place."""
        self._parameters = parameters
        self._before = self._gradients()

    def flags(self) -> bytes:
        """Return of each parameter whether something was added since."""
        both = zip(self._before, self._gradients(), strict=True)
        return bytes(now is not was or version != then for (was, then), (now, version) in both)

    def left_out(self) -> int:
        """Return how many gradients were there before, and got nothing."""
        both = zip(self._before, self._gradients(), strict=True)
        return sum(was is not None and now is was and version == then for (was, then), (now, version) in both)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        every = [None if p.grad is None else held(p.grad) for p in self._parameters]
        return [(each, 0 if each is None else each._version) for each in every]  # noqa: SLF001 - torch's own counter


@contextmanager
def adding_zeros(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a backward adds zeros to the leaves: a loss that counts nothing may have a gradient of 0 / 0."""
    hooks: list[Any] = [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

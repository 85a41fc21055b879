"""Pinned host memory, which a device copies to and from beside its computation."""

from typing import Any

import torch
from torch import Tensor

_SLAB = 1 << 28  # bytes that are pinned at once, at least
_PIECES = 4  # that a slab holds, at least: what is left at its end is a small part of it
_OPEN = 8  # slabs that have room left, and are looked at for a smaller piece
_ALIGNED = 512


class HostMemory:
    """Pinned host memory that is handed out piece by piece, and all of it anew in the next window.

    Pinning takes longer than copying, and torch's own pool rounds every tensor up to a power of two: so slabs are one.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._slabs: list[Tensor] = []
        self._unused: list[Tensor] = []
        self._open: list[list[Any]] = []  # the latest slabs, and how much of each is used

    @property
    def held(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.numel() for slab in self._slabs)

    def begin_anew(self) -> None:
        """Hand out all of it again."""
        self._open, self._unused = [], list(self._slabs)

    def like(self, tensor: Tensor, size: int) -> Tensor:
        """Return room for a tensor of these strides."""
        step = -(-size // _ALIGNED) * _ALIGNED
        place = next((each for each in self._open if each[1] + step <= each[0].numel()), None) or self._opened(step)
        slab, used = place
        place[1] += step
        piece: Tensor = slab[used : used + size].view(tensor.dtype)
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())

    def _opened(self, size: int) -> list[Any]:
        slab = next((each for each in self._unused if each.numel() >= size), None)
        if slab is None:
            number = 1 << (max(_SLAB, _PIECES * size) - 1).bit_length()
            slab = torch.empty(number, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._slabs.append(slab)
        self._unused = [each for each in self._unused if each is not slab]
        self._open = [*self._open[1 - _OPEN :], [slab, 0]]
        return self._open[-1]

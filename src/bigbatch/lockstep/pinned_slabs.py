"""Pinned host memory, which a device copies to and from beside its computation."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SLAB = 1 << 28  # bytes that are pinned at once, at least
_PIECES = 4  # that a slab holds, at least: what is left at its end is a small part of it
_OPEN = 8  # slabs that have room left, and are looked at for a smaller piece
_ALIGNED = 512


@dataclass
class _Open:
    slab: Tensor
    used: int = 0

    def has(self, size: int) -> bool:
        """Whether there is room left."""
        return self.used + size <= self.slab.numel()


class HostMemory:
    """Pinned host memory that is handed out piece by piece, and all of it anew in the next window.

    Pinning takes longer than copying, and torch's own pool rounds every tensor up to a power of two: so slabs are one.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._slabs: list[Tensor] = []
        self._open: list[_Open] = []  # the latest
        self._unused: list[Tensor] = []

    def like(self, tensor: Tensor, size: int) -> Tensor:
        """Return room for a tensor of these strides."""
        step = -(-size // _ALIGNED) * _ALIGNED
        place = next((each for each in self._open if each.has(step)), None) or self._opened(step)
        piece = place.slab[place.used : place.used + size].view(tensor.dtype)
        place.used += step
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())

    @property
    def held(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.numel() for slab in self._slabs)

    def begin_anew(self) -> None:
        """Hand out all of it again."""
        self._open, self._unused = [], list(self._slabs)

    def _opened(self, size: int) -> _Open:
        slab = next((each for each in self._unused if each.numel() >= size), None)
        if slab is None:
            number = 1 << (max(_SLAB, _PIECES * size) - 1).bit_length()
            slab = torch.empty(number, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._slabs.append(slab)
        else:
            self._unused = [each for each in self._unused if each is not slab]
        self._open = [*self._open[1 - _OPEN :], _Open(slab)]
        return self._open[-1]

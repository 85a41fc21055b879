"""Pinned host memory, which a device copies to and from beside its computation."""

import torch
from torch import Tensor

_SLAB = 1 << 28  # bytes that are pinned at once
_ALIGNED = 512


class HostMemory:
    """Pinned host memory that is handed out piece by piece, and all of it anew in the next window.

    Pinning takes longer than copying, and torch's own pool rounds every tensor up to a power of two.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._slabs: list[Tensor] = []
        self._at = self._used = 0

    def like(self, tensor: Tensor, size: int) -> Tensor:
        """Return room for a tensor of these strides."""
        step = -(-size // _ALIGNED) * _ALIGNED
        while self._at < len(self._slabs) and self._used + step > self._slabs[self._at].numel():
            self._at, self._used = self._at + 1, 0
        if self._at == len(self._slabs):
            slab = torch.empty(max(_SLAB, step), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._slabs.append(slab)
        piece = self._slabs[self._at][self._used : self._used + size].view(tensor.dtype)
        self._used += step
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())

    @property
    def held(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.numel() for slab in self._slabs)

    def begin_anew(self) -> None:
        """Hand out all of it again."""
        self._at = self._used = 0

"""The samples of a proof: the big batch, and the micro-batches that a loop would get."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from bigbatch.batch.batch import Batch
from bigbatch.batch.transfer import Mover
from bigbatch.batch.tree import mapped


@dataclass(frozen=True)
class Samples:
    """A big batch and where it is cut."""

    batch: Batch
    sizes: tuple[int, ...]  # of the micro-batches, in order
    device: torch.device

    @property
    def number(self) -> int:
        """How many samples there are."""
        return self.batch.size

    def whole(self, dtype: torch.dtype | None, order: Sequence[int] | None = None) -> Any:
        """Return all samples as one batch on the model's device, in their own order or in another."""
        return self._there(self.batch.take(slice(0, self.number) if order is None else order), dtype)

    def micro_batch(self, place: int, dtype: torch.dtype | None) -> Any:
        """Return one micro-batch on the model's device."""
        end = list(accumulate(self.sizes))[place]
        return self.rows(end - self.sizes[place], end, dtype)

    def rows(self, start: int, end: int, dtype: torch.dtype | None) -> Any:
        """Return some samples on the model's device."""
        return self._there(self.batch.take(slice(start, end)), dtype)

    def micro_batches(self, dtype: torch.dtype | None) -> list[Any]:
        """Return all of them, as a loader would."""
        return [self.micro_batch(place, dtype) for place in range(len(self.sizes))]

    def in_dtype(self, dtype: torch.dtype | None) -> Any:
        """Return a copy of the batch as it was given, wherever it is, in another dtype."""
        whole = mapped(self.batch.whole, lambda _, leaf: _own(leaf))
        return whole if dtype is None else cast(whole, dtype)

    def _there(self, found: Any, dtype: torch.dtype | None) -> Any:
        # A loss may write into its batch: the next run is to find the same samples.
        moved = Mover(self.device).moved(mapped(found, lambda _, leaf: _own(leaf)))
        return moved if dtype is None else cast(moved, dtype)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its numbers, not its labels, in another dtype."""
    return mapped(batch, lambda _, leaf: _cast(leaf, dtype))


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def as_a_loader_cuts(total: int, size: int) -> tuple[int, ...]:
    """Return full micro-batches and a short last one."""
    return (size,) * (total // size) + ((total % size,) if total % size else ())


def uneven(total: int, size: int, *, even_out: bool = False) -> int | None:
    """Return the nearest size by which micro-batches differ; None where there is none.

    A loader leaves a short last one; who evens out makes all alike where their number divides the batch.
    """
    others = [each for each in range(2, total) if total % (-(-total // each) if even_out else each)]
    return min(others, key=lambda each: (abs(each - size), each), default=None)

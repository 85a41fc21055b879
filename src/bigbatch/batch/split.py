"""Where a big batch is cut: which samples go through the model together, and how wide; and how results are joined."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from bigbatch.batch.batch import Batch, Indices, numbers_on
from bigbatch.batch.packing import Padding, pack, pack_alike, trimmed, width_of
from bigbatch.batch.tree import leaves, mapped
from bigbatch.errors import ConfigurationError

_FEW = 16  # shapes that a left-over group may have: worth to be captured, each


@dataclass(frozen=True)
class Division:
    """A big batch and its groups of samples, each a micro-batch."""

    batch: Batch
    groups: tuple[Indices, ...]
    sizes: tuple[int, ...]
    longest: tuple[int, ...] | None = None  # the width of each group, where samples have lengths
    width: int = 0  # to which the batch was padded
    odd: int | None = None  # the group whose shape other batches will hardly have, where there is one
    padding: Padding | None = None

    @classmethod
    def even(cls, batch: Batch, size: int) -> "Division":
        """Cut into micro-batches of at most `size` samples, as they come, of at most two sizes."""
        sizes = balanced(batch.size, size)
        groups = tuple(slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))
        return cls(batch, groups, tuple(sizes))

    @classmethod
    def packed(
        cls, batch: Batch, lengths: Sequence[int], budget: int, most: int | None = None, *, alike: bool = False
    ) -> "Division":
        """Cut into micro-batches of samples of like length, of at most `budget` padded tokens and `most` samples.

        Each is trimmed to its longest sample, or, where they should be `alike`, to one of a few widths.
        """
        width, odd = width_of(batch, max(*lengths, 1)), None
        packed = pack_alike(lengths, budget, most, width=width) if alike else pack(lengths, budget, most)
        full = min(max(budget // packed[0][1], 1), most or batch.size)
        if alike and len(packed) > 1 and len(packed[0][0]) < full:
            # If its shape is new, it takes the host a while: in the middle the device has enough to do meanwhile.
            place = (len(packed) - 1) // 2
            packed.insert(place, packed.pop(0))
            odd = place if full > _FEW else None
        groups, longest = zip(*packed, strict=True)
        padded = sum(len(group) * wide for group, wide in packed)
        padding = Padding(real=sum(lengths), padded=padded, given=batch.size * width)
        return cls(batch, groups, tuple(map(len, groups)), longest, width, odd, padding)

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self.groups)

    @property
    def order(self) -> list[int] | None:
        """Which sample each row of the joined micro-batches is; None where they are in order."""
        return None if self.longest is None else [i for group in self.groups for i in self.indices(group)]

    def comes_again(self, number: int) -> bool:
        """Whether other batches, too, are expected to have a micro-batch of this one's shape."""
        return number != self.odd

    def indices(self, group: Indices) -> list[int]:
        """Return the numbers of a group's samples."""
        return list(range(self.batch.size))[group] if isinstance(group, slice) else list(group)

    def micro_batch(self, number: int) -> Any:
        """Return one micro-batch, where the batch is."""
        return self.part(self.groups[number], None if self.longest is None else self.longest[number])

    def part(self, group: Indices, longest: int | None) -> Any:
        """Return some samples, trimmed to a length."""
        if longest is None or self.batch.collate is not None:
            return self.batch.take(group)
        # Trimmed first: less is copied. By numbers, not as a slice: models call view(-1) on what they are given.
        return trimmed(self.batch, self.width, longest).take(self.indices(group))


def balanced(total: int, largest: int) -> list[int]:
    """Cut `total` samples into as few micro-batches of at most `largest` as there can be, of at most two sizes."""
    number = -(-total // largest)
    size, longer = divmod(total, number)
    return [size + 1] * longer + [size] * (number - longer)


def joined(extras: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None) -> Any:
    """Join what `loss_fn` returned beside the losses of a window's micro-batches.

    A tensor with one row per sample becomes one with all samples' rows, in the batch's own order (`order` says which
    sample each row is of); a list of them where micro-batches were trimmed and rows differ in length. Any other tensor
    is stacked, one entry per micro-batch; what is no tensor makes a list.
    """
    if all(extra is None for extra in extras):
        return None
    every = [dict(leaves(extra, "")) for extra in extras]
    if any(each.keys() != every[0].keys() for each in every):
        raise ConfigurationError(
            "The extras of this batch's micro-batches differ in structure, so they cannot be joined; nothing was "
            "changed.",
            found=", ".join(sorted({type(extra).__name__ for extra in extras})),
            fix="the same names in what every call of loss_fn returns",
        )
    return mapped(extras[0], lambda path, _: _join([each[path] for each in every], sizes, order), "")


def _join(column: list[Any], sizes: Sequence[int], order: Sequence[int] | None) -> Any:
    """Join one leaf of all micro-batches."""
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return column
    if all(leaf.dim() and leaf.shape[0] == size for leaf, size in zip(column, sizes, strict=True)):
        back = None if order is None else sorted(range(len(order)), key=order.__getitem__)
        if any(leaf.shape[1:] != column[0].shape[1:] for leaf in column):
            ragged = [row for leaf in column for row in leaf]
            return ragged if back is None else [ragged[place] for place in back]
        rows = torch.cat(column)
        return rows if back is None else rows.index_select(0, numbers_on(rows.device, back))
    return torch.stack(column) if all(leaf.shape == column[0].shape for leaf in column) else column

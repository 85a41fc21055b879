"""Where a big batch is cut: which samples go through the model together, and how wide; and how results are joined.

Because any split is exact, the samples of a window may be grouped at will: those of like length together, each group
trimmed to its longest, so that little of a micro-batch is padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bigbatch.batch.batch import Batch, Indices, numbers_on
from bigbatch.batch.tree import leaves, mapped
from bigbatch.errors import BatchError, ConfigurationError

Lengths: TypeAlias = str | Callable[[Any], Any]  # the name of a mask, or a function from a batch
_LEAST_STEP = 8  # between two widths; what matrix products like
_FEW = 16  # shapes that a left-over group may have: worth to be captured, each


@dataclass(frozen=True)
class Padding:
    """How much of a window was padding."""

    real: int  # tokens of the samples
    padded: int  # tokens that went through the model
    given: int  # tokens of the batch as it came

    def __str__(self) -> str:
        return (
            f"{self.padded:,} tokens for {self.real:,} real ones ({1 - self.real / max(self.padded, 1):.0%} padding); "
            f"{self.given:,} as the batch came"
        )


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


def pack(lengths: Sequence[int], budget: int, most: int | None = None) -> list[tuple[list[int], int]]:
    """Group samples of like length, the longest first; each group comes with its width, that of its longest sample.

    A group has at most `budget` padded tokens and `most` samples; a sample longer than the budget has its own. There
    are as few groups as there can be, and of those the least padding: with greedy cuts two groups may have half more.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [max(lengths[i], 1) for i in order]
    best = [(0, 0, 0)] * (len(order) + 1)  # from each place on: groups, padded tokens, the first one's end
    for i in reversed(range(len(order))):
        last = min(len(order), i + max(budget // sizes[i], 1), i + (most or len(order)))
        # Cutting later never takes more groups, so only the last few places are tried.
        ends = takewhile(lambda end: best[end][0] == best[last][0], range(last, i, -1))  # noqa: B023 - used at once
        found = [(1 + best[end][0], best[end][1] + sizes[i] * (end - i), end) for end in ends]
        best[i] = min(found, key=lambda each: each[:2])
    groups, i = [], 0
    while i < len(order):
        groups.append((order[i : best[i][2]], sizes[i]))
        i = best[i][2]
    return groups


def pack_alike(
    lengths: Sequence[int], budget: int, most: int | None = None, *, width: int = 0
) -> list[tuple[list[int], int]]:
    """Group samples so that shapes come again from batch to batch, as captured graphs need.

    Widths are those of `rounded`, at most `width`. Only the first group, of the longest samples, has fewer samples than
    its width allows: a group has few of those, so its shapes are few.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    width = max(width, *lengths, 1)  # nothing is ever cut off
    groups: list[tuple[list[int], int]] = []
    start = 0
    while start < len(order):
        wide, number = min(rounded(lengths[order[start]]), width), 0
        while not number or lengths[order[start + number - 1]] > wide:
            wide = min(rounded(wide + 1), width) if number else wide
            number = min(max(budget // wide, 1), most or len(order), len(order) - start)
        groups.append((order[start : start + number], wide))
        start += number
    return groups[::-1]


def rounded(length: int) -> int:
    """Round up to one of eight lengths between a power of two and the next, at most an eighth longer from 64 on."""
    length = max(length, 1)
    step = max((1 << (length - 1).bit_length()) // 16, _LEAST_STEP)
    return -(-length // step) * step


def lengths_of(batch: Batch, given: Lengths) -> list[int]:
    """Return the length of every sample, by the name of a mask or by a function of the batch."""
    found: Any = _mask_lengths(batch, given) if isinstance(given, str) else given(batch.whole)
    try:
        lengths = [int(number) for number in (found.tolist() if isinstance(found, Tensor) else found)]
        told = f"{len(lengths)} for {batch.size} samples, the least {min(lengths, default=0)}"
    except (TypeError, ValueError):
        lengths, told = [], " ".join(str(found).split())[:80]
    if len(lengths) != batch.size or min(lengths) < 0:
        raise BatchError("lengths should give one number per sample, 0 or more.", found=told)
    return lengths


def _mask_lengths(batch: Batch, name: str) -> Tensor:
    whole = batch.whole
    mask = whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:  # noqa: PLR2004 - samples and places
        found = f"a tensor of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"lengths={name!r} should name a mask of samples by places in the batch.",
            found=f"only {', '.join(map(repr, whole))}" if mask is None and isinstance(whole, Mapping) else found,
            fix="Options(lengths=lambda batch: (batch[0] != pad).sum(1))",
        )
    if bool((mask < 0).any()):
        least = int(mask.min())
        raise BatchError(
            f"lengths={name!r} should name a mask, 0 where there is padding.",
            found=f"{least}, which counts as a place that is used",
            fix=f"Options(lengths=lambda batch: (batch[{name!r}] != {least}).sum(1))",
        )
    kept = mask.bool()
    lengths = kept.sum(1)
    if not torch.equal(kept, torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]):
        raise BatchError(
            f"The mask {name!r} has gaps or padding on the left; only padding on the right can be trimmed.",
            fix='tokenizer.padding_side = "right"',
        )
    return lengths


def width_of(batch: Batch, longest: int) -> int:
    """Return how wide the batch was padded, the second dimension that its leaves share."""
    fitting = [
        n for path, leaf in leaves(batch.whole) if _is_wide(batch, path, leaf) and (n := leaf.shape[1]) >= longest
    ]
    return max(fitting, key=lambda width: (fitting.count(width), -width)) if fitting else longest


def trimmed(batch: Batch, width: int, longest: int) -> Batch:
    """Cut the padding off: of every leaf that is as wide as the batch was padded; nothing is copied."""
    cut = mapped(batch.whole, lambda path, leaf: leaf[:, :longest] if _is_wide(batch, path, leaf, width) else leaf)
    return replace(batch, whole=cut)


def refuse_loss_of_content(batch: Batch, lengths: Sequence[int], width: int) -> None:
    """Raise where what would be cut off is not padding: beyond the lengths, all samples should be alike."""
    shortest = min(range(batch.size), key=lambda i: lengths[i])
    for path, leaf in ((path, leaf) for path, leaf in leaves(batch.whole) if _is_wide(batch, path, leaf, width)):
        ends = torch.tensor(lengths, device=leaf.device)[:, None]
        within = (torch.arange(width, device=leaf.device) < ends).reshape(batch.size, width, *(1,) * (leaf.dim() - 2))
        if not bool((within | (leaf == leaf[shortest])).all()):  # a constant, or places counted on
            raise BatchError(
                f"{path} is as wide as the padded batch ({width}), and beyond its samples' lengths it differs from "
                "sample to sample: it is no padding, and trimming it would lose data.",
                fix="padding on the right, and lengths= that count every place in use; or, for a tensor without "
                "places, (samples, 1, features)",
            )


def _is_wide(batch: Batch, path: str, leaf: Any, width: int | None = None) -> bool:
    """Whether a leaf has places along its second dimension, as many as the batch was padded to where that is given."""
    return path in batch.sampled and isinstance(leaf, Tensor) and leaf.dim() > 1 and width in {None, leaf.shape[1]}

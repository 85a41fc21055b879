"""Sort samples by length and pack them, so that little of a micro-batch is padding.

Because any split is exact, the samples of a window may be grouped at will: those of like length together, each group
trimmed to its longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.batch.tree import Batch, leaves, mapped
from bigbatch.errors import BatchError
from bigbatch.options import Options

_FEW = 2**15  # elements that torch handles on one thread
_LEAST_STEP = 8  # between two widths; what matrix products like


@dataclass(frozen=True)
class Padding:
    """How much of a window was padding."""

    real: int
    """Tokens of the samples."""
    padded: int
    """Tokens that went through the model."""
    given: int
    """Tokens of the batch as it came."""

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.padded:,} tokens for {self.real:,} real ones ({1 - self.real / max(self.padded, 1):.0%} padding); "
            f"{self.given:,} as the batch came"
        )


def pack(lengths: Sequence[int], budget: int, most: int | None = None) -> list[list[int]]:
    """Group samples so that a group's number times its longest is at most `budget`, and its number at most `most`.

    As few groups as there can be, and of those the least padding: samples in order of length make the best groups, so
    it is a matter of where to cut. A sample longer than the budget has a group of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [max(lengths[i], 1) for i in order]
    total = len(sizes)
    room = [min(total - i, max(budget // size, 1), most or total) for i, size in enumerate(sizes)]
    groups, padded, cut = [0] * (total + 1), [0] * (total + 1), [0] * total
    for i in reversed(range(total)):
        farthest = i + room[i]
        # Cutting later never takes more groups, so only the last few places are worth a look.
        best = farthest
        fewest = groups[farthest]
        for end in range(farthest - 1, i, -1):
            if groups[end] != fewest:
                break
            if padded[end] + sizes[i] * (end - i) < padded[best] + sizes[i] * (best - i):
                best = end
        groups[i], padded[i], cut[i] = 1 + fewest, padded[best] + sizes[i] * (best - i), best
    found, i = [], 0
    while i < total:
        found.append(order[i : cut[i]])
        i = cut[i]
    return found


def pack_alike(lengths: Sequence[int], budget: int, width: int, most: int | None = None) -> list[tuple[list[int], int]]:
    """Group samples so that shapes come again from batch to batch; each group comes with its width.

    A few widths only (see `rounded`), at most `width`, and always as many samples as the budget allows for that width.
    What is left over, the last group, is of the longest samples: a group has few of those, so its shapes are few.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    width = max(width, *lengths, 1)  # nothing is ever cut off
    found: list[tuple[list[int], int]] = []
    start = 0
    while start < len(order):
        wide = min(rounded(lengths[order[start]]), width)
        while True:
            number = min(max(budget // wide, 1), most or len(order), len(order) - start)
            longest = lengths[order[start + number - 1]]
            if longest <= wide:
                break
            wide = min(rounded(wide + 1), width)
        found.append((order[start : start + number], wide))
        start += number
    return [*reversed(found[:-1]), found[-1]]


def rounded(length: int) -> int:
    """Round up to one of eight lengths between a power of two and the next, at most an eighth longer from 64 on."""
    length = max(length, 1)
    step = max((1 << (length - 1).bit_length()) // 16, _LEAST_STEP)
    return -(-length // step) * step


def expected_seconds(lengths: Sequence[int], budget: int, least: float, per_token: float) -> float:
    """Estimate how long a packed batch takes: each micro-batch at least `least`, the time to launch it."""
    groups = pack(lengths, budget)
    tokens = [len(group) * max(1, *(lengths[i] for i in group)) for group in groups]
    return sum(max(least, per_token * number) for number in tokens)


def lengths_of(batch: Batch, options: Options) -> list[int]:
    """Return the length of every sample, by a mask or a function."""
    given = options.lengths
    if isinstance(given, str):
        found: Any = _mask_lengths(batch, given)
    else:
        assert given is not None  # noqa: S101 - the caller has looked
        found = given(batch.whole)
    if isinstance(found, Tensor):
        found = found.tolist()
    try:
        lengths = [int(number) for number in found]
    except (TypeError, ValueError):
        msg = f"lengths should give one number per sample; found {found!s:.80}"
        raise BatchError(msg) from None
    if len(lengths) != batch.size or min(lengths) < 0:
        msg = f"lengths gave {len(lengths)} numbers for {batch.size} samples; return one per sample, 0 or more"
        raise BatchError(msg)
    return lengths


def _mask_lengths(batch: Batch, name: str) -> Tensor:
    whole = batch.whole
    mask = whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:  # noqa: PLR2004 - samples and places
        found = f"a tensor of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        if mask is None and isinstance(whole, Mapping):
            found = f"only {', '.join(repr(key) for key in whole)}"
        msg = (
            f"lengths={name!r} should name a mask of samples by places in the batch; found {found}.\n"
            "Give a function instead:  Options(lengths=lambda batch: (batch[0] != pad).sum(1))"
        )
        raise BatchError(msg)
    places = torch.arange(mask.shape[1], device=mask.device)
    lengths, is_prefix = [], True
    for rows in in_parts(mask):
        if bool((rows < 0).any()):
            msg = (
                f"lengths={name!r} should name a mask, 0 where there is padding; found {int(rows.min())}, which counts "
                "as a place that is used.\n"
                "Name the mask:  Options(lengths='attention_mask')\n"
                f"or count:  Options(lengths=lambda batch: (batch[{name!r}] != {int(rows.min())}).sum(1))"
            )
            raise BatchError(msg)
        kept = rows.bool()
        lengths.append(kept.sum(1))
        is_prefix = is_prefix and torch.equal(kept, places < lengths[-1][:, None])
    if not is_prefix:
        msg = (
            f"the mask {name!r} has gaps or padding on the left; only padding on the right can be trimmed.\n"
            'Set tokenizer.padding_side = "right".'
        )
        raise BatchError(msg)
    return torch.cat(lengths)


def in_parts(table: Tensor) -> Sequence[Tensor]:
    """Cut a table in host memory into rows of few elements: a CPU's threads take longer to meet than to work on them.

    The device waits for what is done with a batch before its first micro-batch, and on a busy host every meeting of
    sixteen threads may take milliseconds.
    """
    if table.device.type != "cpu":
        return (table,)
    parts: Sequence[Tensor] = table.split(max(_FEW // max(table[:1].numel(), 1), 1))
    return parts


def width_of(batch: Batch, longest: int) -> int:
    """Return how wide the batch was padded, the second dimension that its leaves share."""
    widths = [leaf.shape[1] for path, leaf in leaves(batch.whole) if path in batch.sampled and _is_wide(leaf)]
    fitting = [width for width in widths if width >= longest]
    return max(fitting, key=lambda width: (fitting.count(width), -width)) if fitting else longest


def trimmed(batch: Batch, width: int, longest: int) -> Batch:
    """Cut the padding off: of every leaf that is as wide as the batch was padded; nothing is copied."""

    def trim(path: str, leaf: Any) -> Any:
        wide = path in batch.sampled and _is_wide(leaf) and leaf.shape[1] == width
        return leaf[:, :longest] if wide else leaf

    return replace(batch, whole=mapped(batch.whole, trim))


def refuse_loss_of_content(batch: Batch, lengths: Sequence[int], width: int) -> None:
    """Raise where what would be cut off is not padding: beyond the lengths, all samples should be alike."""
    shortest = min(range(batch.size), key=lambda i: lengths[i])
    for path, leaf in leaves(batch.whole):
        if path not in batch.sampled or not _is_wide(leaf) or leaf.shape[1] != width:
            continue
        if not _is_padding(leaf, torch.tensor(lengths, device=leaf.device), leaf[shortest]):
            msg = (
                f"{path} is as wide as the padded batch ({width}), and beyond its samples' lengths it differs from "
                "sample to sample: it is no padding, and trimming it would lose data.\n"
                "Check that lengths= counts every place that is used, and that padding is on the right; if this "
                "tensor has no places at all, reshape it, as to (samples, 1, features)."
            )
            raise BatchError(msg)


def _is_padding(leaf: Tensor, lengths: Tensor, like: Tensor) -> bool:
    """Whether all samples are like this one beyond their lengths: a constant, or places counted on."""
    places = torch.arange(leaf.shape[1], device=leaf.device)
    parts = in_parts(leaf)
    for rows, ends in zip(parts, lengths.split([len(part) for part in parts]), strict=True):
        within = (places < ends[:, None]).reshape(*ends.shape, -1, *(1,) * (leaf.dim() - 2))
        if not bool((within | (rows == like)).all()):
            return False
    return True


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1

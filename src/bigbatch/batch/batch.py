"""A big batch: which of its leaves hold samples, how many samples there are, and a micro-batch of some of them.

Samples lie along the first dimension of those leaves that agree on its size. All other leaves go into every micro-batch
whole.
"""

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bigbatch.batch.tree import apart, children, is_array, is_plain_list, leaves, mapped, own
from bigbatch.errors import BatchError

Indices: TypeAlias = slice | Sequence[int]
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """The shape of one sample: the same number of samples of one shape takes the same memory in every batch."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()  # path, dtype, dimensions; none where `collate` decides

    def holds(self, other: "SampleShape") -> bool:
        """Whether samples of this shape have all that those of another have, and perhaps more in some dimension."""
        kinds, others = ([(path, dtype, len(dims)) for path, dtype, dims in each.tensors] for each in (self, other))
        sizes, least = ([size for *_, dims in each.tensors for size in dims] for each in (self, other))
        return kinds == others and all(map(operator.ge, sizes, least))

    def __str__(self) -> str:
        return "; ".join(f"{path} {dtype} {list(dims)}" for path, dtype, dims in self.tensors) or "samples"


@dataclasses.dataclass(frozen=True)
class Batch:
    """A big batch that can be cut: how many samples it has, and which of its leaves have them."""

    whole: Any
    size: int
    sampled: frozenset[str] = frozenset()  # paths of the leaves that are cut
    collate: Callable[[list[Any]], Any] | None = None
    versions: tuple[tuple[Tensor, int], ...] = ()  # of its tensors, as it came

    @classmethod
    def of(
        cls, whole: Any, *, collate: Callable[[list[Any]], Any] | None = None, shared: frozenset[str] = frozenset()
    ) -> "Batch":
        """Find the samples of a batch; `shared` are paths of leaves that are known to have none."""
        found = [leaf for _, leaf in leaves(whole) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = tuple((tensor, tensor._version) for tensor in found)  # noqa: SLF001 - torch's own counter
        if collate is not None:
            if isinstance(whole, Tensor | Mapping | str) or not isinstance(whole, Sequence):
                raise BatchError(
                    "Options(collate=...) makes micro-batches of a list of samples.",
                    found=_kind(whole),
                    fix="DataLoader(data, batch_size=4096, collate_fn=list), or leave collate out for collated batches",
                )
            if not whole:
                raise _empty()
            return cls(whole, len(whole), collate=collate, versions=versions)
        _refuse_samples(whole)
        _refuse_columns(whole)
        lengths = {path: length for path, leaf in leaves(whole) if (length := _length(leaf)) is not None}
        if not lengths:
            raise BatchError(
                "This batch has no tensor with samples along its first dimension.",
                found=_kind(whole),
                fix="tensors, or a list of samples with Options(collate=torch.utils.data.default_collate)",
            )
        if lengths.keys() <= shared:  # a batch of another kind than those before
            shared = frozenset()
        size = _agreed({path: length for path, length in lengths.items() if path not in shared}, whole)
        lengths.update({path: len(leaf) for path, leaf in leaves(whole) if is_plain_list(leaf)})
        sampled = frozenset(path for path, length in lengths.items() if length == size and path not in shared)
        return cls(whole, size, sampled, versions=versions)

    @property
    def shared(self) -> frozenset[str]:
        """The tensors and lists that go into every micro-batch whole."""
        every = leaves(self.whole) if self.collate is None else ()
        return frozenset(path for path, leaf in every if isinstance(leaf, Tensor) or is_plain_list(leaf)) - self.sampled

    def take(self, indices: Indices) -> Any:
        """Return a micro-batch: these samples, in this order, in the structure of the batch."""
        if self.collate is not None:
            return self.collate([apart(sample) for sample in self._samples(indices)])
        return mapped(self.whole, lambda path, leaf: _taken(leaf, indices) if path in self.sampled else own(leaf))

    def only(self, indices: Sequence[int]) -> "Batch":
        """Return a batch of some of the samples."""
        whole = self.take(indices) if self.collate is None else self._samples(indices)
        return dataclasses.replace(self, whole=whole, size=len(indices), versions=())

    def _samples(self, indices: Indices) -> list[Any]:
        return list(self.whole[indices]) if isinstance(indices, slice) else [self.whole[i] for i in indices]

    def refuse_changed(self) -> None:
        """Raise where a forward has written into the batch: the same samples could not be run a second time.

        Tensors tell by their versions. Arrays have none, so each micro-batch has its own.
        """
        if all(tensor._version == version for tensor, version in self.versions):  # noqa: SLF001 - torch's own counter
            return
        who = "loss_fn has changed its batch" if self.collate is None else "collate has changed its samples"
        raise BatchError(
            f"{who} in place, and a second run of the same samples would see other data. The model is unchanged.",
            fix="x = (x - mean) / std instead of x.sub_(mean).div_(std), or clone what you change",
        )

    def signature(self) -> SampleShape:
        """Return the shape of one sample."""
        return SampleShape(
            tuple(
                (path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape[1:]))
                for path, leaf in (leaves(self.whole) if self.collate is None else ())
                if path in self.sampled and isinstance(leaf, Tensor)
            )
        )


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Bring indices to a device without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _taken(leaf: Any, indices: Indices) -> Any:
    if isinstance(indices, slice):
        return own(leaf[indices])
    if isinstance(leaf, Tensor):
        return leaf.index_select(0, numbers_on(leaf.device, indices))
    if isinstance(leaf, list | tuple):
        return type(leaf)(leaf[i] for i in indices)
    return leaf[list(indices)]


def _length(leaf: Any) -> int | None:
    return leaf.shape[0] if (isinstance(leaf, Tensor) or is_array(leaf)) and leaf.ndim else None


def _agreed(lengths: dict[str, int], whole: Any) -> int:
    """Return the size that most leaves agree on; a single row may be meant for all samples, so it yields at a tie."""
    votes = Counter(length for length in lengths.values() if length != 1) or Counter(lengths.values())
    (size, most), *others = votes.most_common()
    if list(lengths.values()).count(1) > most:
        return 1  # one sample and something shared; were it many with shared rows, to run them at once is right, too
    if others and others[0][1] == most:
        shown = [f"{path}: {list(leaf.shape)}" for path, leaf in leaves(whole) if path in lengths]
        raise BatchError(
            f"The tensors of this batch disagree on how many samples there are: {size} and {others[0][0]} rows are "
            "found equally often.",
            found=", ".join(shown[:_SHOWN]) + " and more" * (len(shown) > _SHOWN),
            fix="one row per sample in every tensor, and what all samples share in loss_fn, not in the batch",
        )
    if not size:
        raise _empty()
    return size


def _refuse_samples(whole: Any) -> None:
    """Raise for a list of samples, each with a number of its own such as a label: it is no collated batch."""
    is_several = isinstance(whole, list) and len(whole) > 1  # one sample looks like anything
    if is_several and all(
        children(sample) is not None
        and any(
            isinstance(leaf, int | float) or (isinstance(leaf, Tensor) and not leaf.dim()) for _, leaf in leaves(sample)
        )
        for sample in whole
    ):
        raise BatchError(
            f"This batch is a list of {len(whole)} samples, not a batch of them.",
            fix="BigStep(..., options=Options(collate=torch.utils.data.default_collate))",
        )


def _refuse_columns(whole: Any) -> None:
    """Raise for a list with an entry for each sample, as of images, inside a batch: it would be cut within samples."""
    parts = dict(children(whole) or ())
    lists = {
        key: part
        for key, part in parts.items()
        if isinstance(part, list | tuple) and not hasattr(part, "_fields") and len(part) > 1 and not is_plain_list(part)
    }
    rows = {_length(leaf) for key, part in parts.items() if key not in lists for _, leaf in leaves(part)} - {None}
    every = [leaf for part in lists.values() for _, leaf in leaves(part)]
    inside = {0 if isinstance(leaf, Tensor) and not leaf.dim() else _length(leaf) for leaf in every} - {None}
    numbers = rows | {len(part) for part in lists.values()}
    if lists and len(numbers) == 1 and not inside <= numbers and (rows or len(inside) > 1):
        key, part = next(iter(lists.items()))
        raise BatchError(
            f"batch{key} is a {type(part).__name__} of {len(part)}, one for each sample, not a tensor of rows.",
            fix="DataLoader(..., collate_fn=list) and Options(collate=lambda samples: tuple(zip(*samples)))",
        )


def _kind(whole: Any) -> str:
    found = ", ".join(type(leaf).__name__ for _, leaf in list(leaves(whole))[:_SHOWN])
    return f"{type(whole).__name__} of {found}" if children(whole) is not None else type(whole).__name__


def _empty() -> BatchError:
    return BatchError(
        "There is no sample to train on: this batch is empty.",
        fix="leave it out; over several ranks, one that has no samples in an update calls  step(None)",
    )

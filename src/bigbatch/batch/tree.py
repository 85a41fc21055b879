"""Cut a big batch into micro-batches of the same structure, whatever holds its tensors.

A batch is a tree: tensors in tuples, named tuples, lists, mappings, dataclasses, nested. Its samples lie along the
first dimension of those leaves that agree on its size; all other leaves go into every micro-batch as they are.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from bigbatch.batch.copies import PLAIN, apart, dataclass_like, is_array, mapping_like, own, versions_of
from bigbatch.caller import outside
from bigbatch.errors import BatchError

Indices: TypeAlias = slice | Sequence[int]
_SHOWN = 8


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
        if collate is not None:
            return cls._of_samples(whole, collate)
        if _looks_like_samples(whole):
            msg = (
                f"this batch is a list of {len(whole)} samples, not a batch of them.\n"
                "Say how micro-batches are made of samples:\n"
                "    BigStep(..., options=Options(collate=torch.utils.data.default_collate))"
            )
            raise BatchError(msg)
        _refuse_columns(whole)
        lengths = {path: length for path, leaf in leaves(whole) if (length := _length(leaf)) is not None}
        if not lengths:
            msg = (
                f"this batch has no tensor with samples along its first dimension: found {_kind(whole)}.\n"
                "Pass tensors, or a list of samples with Options(collate=torch.utils.data.default_collate)."
            )
            raise BatchError(msg)
        if lengths.keys() <= shared:  # a batch of another kind than those before
            shared = frozenset()
        size = _agreed({path: length for path, length in lengths.items() if path not in shared}, whole)
        lengths.update({path: len(leaf) for path, leaf in leaves(whole) if _is_plain_list(leaf)})
        sampled = frozenset(path for path, length in lengths.items() if length == size and path not in shared)
        return cls(whole, size, sampled, versions=versions_of(whole))

    @classmethod
    def _of_samples(cls, whole: Any, collate: Callable[[list[Any]], Any]) -> "Batch":
        if isinstance(whole, Tensor | Mapping | str) or not isinstance(whole, Sequence):
            msg = (
                f"Options(collate=...) makes micro-batches of a list of samples; found {_kind(whole)}.\n"
                "Take collate out for batches that are collated already, or have the loader pass lists:\n"
                "    DataLoader(data, batch_size=4096, collate_fn=list)"
            )
            raise BatchError(msg)
        if not whole:
            raise BatchError(_EMPTY)
        return cls(whole, len(whole), collate=collate, versions=versions_of(whole))

    @property
    def shared(self) -> frozenset[str]:
        """The tensors and lists that go into every micro-batch whole."""
        if self.collate is not None:
            return frozenset()
        found = frozenset(path for path, leaf in leaves(self.whole) if isinstance(leaf, Tensor) or _is_plain_list(leaf))
        return found - self.sampled

    def warn_of_repeated(self) -> None:
        """Say which tensors with rows for every sample, and several, go into every micro-batch whole."""
        for path, leaf in leaves(self.whole):
            rows = _length(leaf) or 0
            if path in self.shared and rows > self.size > 1 and not rows % self.size:
                shape = f"({self.size}, {rows // self.size}, ...)"
                msg = (
                    f"{path} has {rows} rows where there are {self.size} samples, so it goes into every micro-batch "
                    "whole, which takes as much memory and time as all of it each time.\n"
                    f"If {rows // self.size} rows of it go with each sample, pass it as {shape}; if all samples share "
                    "it, keep it out of the batch."
                )
                warnings.warn(msg, stacklevel=outside())

    def take(self, indices: Indices) -> Any:
        """Return a micro-batch: these samples, in this order, in the structure of the batch."""
        if self.collate is not None:
            chosen = self.whole[indices] if isinstance(indices, slice) else [self.whole[i] for i in indices]
            return self.collate([apart(sample) for sample in chosen])
        return mapped(self.whole, lambda path, leaf: _taken(leaf, indices) if path in self.sampled else own(leaf))

    def only(self, indices: Sequence[int]) -> "Batch":
        """Return a batch of some of the samples."""
        if self.collate is not None:
            return dataclasses.replace(self, whole=[self.whole[i] for i in indices], size=len(indices), versions=())
        return dataclasses.replace(self, whole=self.take(indices), size=len(indices), versions=())

    def refuse_changed(self) -> None:
        """Raise where a forward has written into the batch: the same samples could not be run a second time.

        Tensors tell by their versions. Arrays have none, so each micro-batch has its own.
        """
        if any(tensor._version != version for tensor, version in self.versions):  # noqa: SLF001 - torch's own counter
            who = (
                "loss_fn has changed its batch in place, and micro-batches on the model's own device are views of it"
                if self.collate is None
                else "collate has changed its samples in place"
            )
            msg = (
                f"{who}: running the same samples a second time, as to check or after running out of memory, would "
                "train on other data. This batch has been changed; the model has not.\n"
                "Write x = (x - mean) / std instead of x.sub_(mean).div_(std), or clone what you change."
            )
            raise BatchError(msg)

    def signature(self) -> str:
        """Name the shape of one sample: batches that share it need the same memory for as many samples."""
        if self.collate is not None:
            return "samples"
        return "; ".join(
            f"{path} {leaf.dtype} {list(leaf.shape[1:])}".replace("torch.", "")
            for path, leaf in leaves(self.whole)
            if path in self.sampled and isinstance(leaf, Tensor)
        )


def balanced(total: int, largest: int) -> list[int]:
    """Cut `total` samples into as few micro-batches of at most `largest` as there can be, of at most two sizes."""
    number = -(-total // largest)
    size, longer = divmod(total, number)
    return [size + 1] * longer + [size] * (number - longer)


def leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield what a batch holds, each with the expression that finds it."""
    children = _children(tree)
    if children is None:
        yield path, tree
    else:
        for key, child in children:
            yield from leaves(child, path + key)


def mapped(tree: Any, function: Callable[[str, Any], Any], path: str = "batch") -> Any:
    """Return a batch of the same structure with every leaf replaced."""
    children = _children(tree)
    if children is None:
        return function(path, tree)
    made = [mapped(child, function, path + key) for key, child in children]
    if isinstance(tree, Mapping):
        return mapping_like(tree, dict(zip(tree, made, strict=True)))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclass_like(tree, made)
    if isinstance(tree, tuple):
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return made


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container with how each is written; None for a leaf."""
    if isinstance(tree, Mapping):  # a Hugging Face BatchEncoding is one, too
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, PackedSequence):
        raise BatchError(_PACKED)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple) and not _is_plain_list(tree):
        return [(f"[{number}]", child) for number, child in enumerate(tree)]
    return None


def _looks_like_samples(whole: Any) -> bool:
    """Tell a list of samples, each with a number of its own such as a label, from a batch that was collated."""
    if not isinstance(whole, list) or len(whole) < 2:  # noqa: PLR2004 - one sample looks like anything
        return False
    return all(
        _children(sample) is not None and any(_is_number(leaf) for _, leaf in leaves(sample)) for sample in whole
    )


def _refuse_columns(whole: Any) -> None:
    """Refuse a list with an entry for each sample, as of images, inside a batch: it would be cut within samples."""
    parts = dict(_children(whole) or ())
    lists = {
        key: part for key, part in parts.items() if isinstance(part, list | tuple) and not hasattr(part, "_fields")
    }
    lists = {key: part for key, part in lists.items() if len(part) > 1 and not _is_plain_list(part)}
    rows = {_length(leaf) for key, part in parts.items() if key not in lists for _, leaf in leaves(part)} - {None}
    inside = {_length(leaf) for part in lists.values() for _, leaf in leaves(part)} - {None}
    numbers = rows | {len(part) for part in lists.values()}
    if not lists or len(numbers) > 1 or inside <= numbers or (not rows and len(inside) == 1):
        return
    key, part = next(iter(lists.items()))
    msg = (
        f"batch{key} is a {type(part).__name__} of {len(part)}, one for each sample, and not a tensor with a row for "
        "each.\n"
        "Pass the samples, and how a micro-batch is made of them:\n"
        "    DataLoader(data, batch_size=4096, collate_fn=list)\n"
        "    BigStep(..., options=Options(collate=lambda samples: tuple(zip(*samples))))"
    )
    raise BatchError(msg)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) or (isinstance(leaf, Tensor) and not leaf.dim())


def _is_plain_list(tree: Any) -> bool:
    """Tell a list of texts or numbers, one per sample, from a container."""
    return isinstance(tree, list | tuple) and bool(tree) and all(isinstance(child, PLAIN) for child in tree)


def _length(leaf: Any) -> int | None:
    """Return how many rows a leaf has, where it can have samples: a tensor or an array."""
    return leaf.shape[0] if (isinstance(leaf, Tensor) or is_array(leaf)) and leaf.ndim else None


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Bring indices to a device without waiting for it."""
    found = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return found.to(device, non_blocking=True)


def _taken(leaf: Any, indices: Indices) -> Any:
    if isinstance(indices, slice):
        return own(leaf[indices])
    if isinstance(leaf, Tensor):
        return leaf.index_select(0, numbers_on(leaf.device, indices))
    if isinstance(leaf, list | tuple):
        return type(leaf)(leaf[i] for i in indices)
    return leaf[list(indices)]


def _agreed(lengths: dict[str, int], whole: Any) -> int:
    """Return the size that most leaves agree on; a single row may be meant for all samples, so it yields at a tie."""
    votes = Counter(length for length in lengths.values() if length != 1) or Counter(lengths.values())
    (size, most), *others = votes.most_common()
    if list(lengths.values()).count(1) > most:
        return 1  # one sample and something shared; were it many with shared rows, to run them at once is right, too
    if not size and not others:
        raise BatchError(_EMPTY)
    if others and others[0][1] == most:
        tensors = [(path, leaf) for path, leaf in leaves(whole) if path in lengths]
        shown = "\n".join(f"    {path}: {list(leaf.shape)}" for path, leaf in tensors[:_SHOWN])
        more = f"\n    and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
        msg = (
            f"the tensors of this batch disagree on how many samples there are: found {size} and {others[0][0]} "
            f"rows equally often.\n{shown}{more}\n"
            "Give every tensor one row per sample, and keep what all samples share out of the batch, as in\n"
            "    loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weights)"
        )
        raise BatchError(msg)
    if not size:
        raise BatchError(_EMPTY)
    return size


def _kind(whole: Any) -> str:
    found = ", ".join(type(leaf).__name__ for _, leaf in list(leaves(whole))[:_SHOWN])
    return f"{type(whole).__name__} of {found}" if _children(whole) is not None else type(whole).__name__


_EMPTY = (
    "this batch is empty: it has no sample. Leave it out, or look at how the loader makes it; over several ranks, one "
    "that has no samples in an update gives None:  step(None)"
)
_PACKED = (
    "this batch holds a PackedSequence, whose samples lie interleaved and cannot be cut apart.\n"
    "Pass the padded tensor and its lengths, and pack in loss_fn:\n"
    "    pack_padded_sequence(batch['x'], batch['lengths'].cpu(), batch_first=True, enforce_sorted=False)"
)

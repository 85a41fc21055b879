"""What may be written into a batch: a tensor tells by its version, and of all else there is a copy to write into."""

import copy
import dataclasses
import io
import pickle
from collections import UserDict
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

PLAIN = (str, bytes, int, float, bool)
_FEW = 16  # of what a sample holds: most have a name or a place each


def is_array(leaf: Any) -> bool:
    """Tell numpy's arrays, without asking for numpy."""
    return not isinstance(leaf, Tensor) and hasattr(leaf, "__array_interface__") and hasattr(leaf, "ndim")


def own(leaf: Any) -> Any:
    """Copy an array: nothing tells when it was written into."""
    return copy.copy(leaf) if is_array(leaf) else leaf


def apart(sample: Any) -> Any:  # noqa: PLR0911 - one way out per kind of container
    """Return a sample that collate may take apart: what holds its tensors is copied, the tensors are not.

    There may be thousands of them, so what most samples are made of comes first.
    """
    kind = type(sample)
    if kind is dict:
        return {key: apart(value) for key, value in sample.items()}
    if kind is list:
        return sample.copy() if _is_long(sample) else [apart(each) for each in sample]
    if kind is tuple:
        return tuple([apart(each) for each in sample])
    if isinstance(sample, tuple):
        return kind(*map(apart, sample)) if hasattr(sample, "_fields") and kind is not PackedSequence else sample
    if isinstance(sample, dict | UserDict):  # another mapping may mind: it may be locked, or load what is asked for
        return mapping_like(sample, {key: apart(value) for key, value in sample.items()})
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return dataclass_like(sample, [apart(getattr(sample, field.name)) for field in dataclasses.fields(sample)])
    return own(sample)


def versions_of(whole: Any) -> tuple[tuple[Tensor, int], ...]:
    """Return the tensors of a batch or of its samples, with their versions as they are now."""
    found, stack = [], [whole]
    while stack:
        each = stack.pop()
        if isinstance(each, Tensor):
            if not each.is_inference():
                found.append((each, each._version))  # noqa: SLF001 - torch's own counter
        elif isinstance(each, list | tuple):
            if not _is_long(each):
                stack.extend(each)
        elif isinstance(each, PLAIN):
            continue
        elif isinstance(each, Mapping):
            stack.extend(each.values())
        elif dataclasses.is_dataclass(each) and not isinstance(each, type):
            stack.extend(getattr(each, field.name) for field in dataclasses.fields(each))
    return tuple(found)


class Content(pickle.Pickler):
    """What is in a batch of any kind, to tell whether it was written into; the digest is None where nothing tells."""

    def __init__(self, batch: Any) -> None:
        self._batch, self._tensors = batch, dict[int, Tensor]()
        self.digest: int | None = None
        written = io.BytesIO()
        super().__init__(written, pickle.HIGHEST_PROTOCOL)
        with suppress(Exception):
            self.dump(batch)
            self.digest = hash(written.getvalue())

    def reducer_override(self, value: Any) -> Any:
        """Write a tensor's own values, not all of its storage; and what was defined locally by its name."""
        if isinstance(value, type | FunctionType) and "<" in value.__qualname__:  # <locals>, <lambda>
            return str, (value.__qualname__,)
        if not isinstance(value, Tensor):
            return NotImplemented
        self._tensors[id(value)] = value
        if value.layout is not torch.strided or value.is_nested:
            return NotImplemented  # torch takes it apart
        values = value.detach().cpu().reshape(-1).view(torch.uint8)
        return bytes, (values.numpy().tobytes(),)

    def copied(self) -> Any:
        """Return a copy of the batch, or None where it cannot be copied or compared."""
        with suppress(Exception):
            if self.digest is None:
                return None
            return copy.deepcopy(self._batch, {key: value.detach().clone() for key, value in self._tensors.items()})
        return None


def _is_long(found: Sequence[Any]) -> bool:
    """Tell a text as tokens by its first and its last: to look at each takes longer than to train on it."""
    return len(found) > _FEW and isinstance(found[0], PLAIN) and isinstance(found[-1], PLAIN)


def mapping_like(tree: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """Return a mapping of the same kind with other values; a dict where it cannot be written."""
    if type(tree) is not dict and isinstance(tree, MutableMapping):
        alike = copy.copy(tree)  # keeps what a subclass carries beside its items
        if getattr(alike, "data", None) is not None and getattr(alike, "data", None) is getattr(tree, "data", None):
            alike.data = dict(made)  # type: ignore[attr-defined]  # a UserDict's copy may share its items
        for key, value in made.items():  # a Hugging Face ModelOutput has no update
            alike[key] = value
        return alike
    return made


def dataclass_like(tree: Any, made: list[Any]) -> Any:
    """Return a dataclass of the same kind with other values."""
    alike = copy.copy(tree)  # not made anew: __init__ and __post_init__ may want other things
    for field, value in zip(dataclasses.fields(tree), made, strict=True):
        object.__setattr__(alike, field.name, value)  # frozen ones, too
    return alike

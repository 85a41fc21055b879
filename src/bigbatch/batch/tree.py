"""A batch is a tree: tensors in tuples, lists, mappings and dataclasses, nested. Walk it, map it, copy it."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from bigbatch.errors import BatchError

PLAIN = (str, bytes, int, float, bool)
_FEW = 16  # entries of a list; a longer one is a text as tokens, or has one for each sample


def leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield what a batch holds, each with the expression that finds it."""
    found = children(tree)
    if found is None:
        yield path, tree
    else:
        for key, child in found:
            yield from leaves(child, path + key)


def mapped(tree: Any, function: Callable[[str, Any], Any], path: str = "batch") -> Any:
    """Return a batch of the same structure with every leaf replaced."""
    found = children(tree)
    if found is None:
        return function(path, tree)
    made = [mapped(child, function, path + key) for key, child in found]
    if isinstance(tree, Mapping):
        return _mapping_like(tree, dict(zip(tree, made, strict=True)))
    if _is_dataclass(tree):
        alike = copy.copy(tree)  # not made anew: __init__ and __post_init__ may want other things
        for field, value in zip(dataclasses.fields(tree), made, strict=True):
            object.__setattr__(alike, field.name, value)  # frozen ones, too
        return alike
    if isinstance(tree, tuple):
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return made


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container, each with the code that selects it; None for a leaf."""
    if isinstance(tree, Mapping):  # a Hugging Face BatchEncoding is one, too
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if _is_dataclass(tree):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, PackedSequence):
        raise BatchError(
            "This batch holds a PackedSequence, whose samples lie interleaved and cannot be cut apart.",
            fix="the padded tensor and its lengths, and pack_padded_sequence(..., enforce_sorted=False) in loss_fn",
        )
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple) and not is_plain_list(tree):
        return [(f"[{number}]", child) for number, child in enumerate(tree)]
    return None


def is_plain_list(tree: Any) -> bool:
    """Tell a list of texts or numbers, one per sample or a text as tokens, from a container.

    Of a long one by its first and its last entry: to look at each takes longer than to train on it.
    """
    if not isinstance(tree, list | tuple) or not tree:
        return False
    return all(isinstance(child, PLAIN) for child in (tree if len(tree) <= _FEW else (tree[0], tree[-1])))


def is_array(leaf: Any) -> bool:
    """Tell numpy's arrays, without importing numpy."""
    return not isinstance(leaf, Tensor) and hasattr(leaf, "__array_interface__") and hasattr(leaf, "ndim")


def own(leaf: Any) -> Any:
    """Copy an array or a list: nothing tells when someone writes into it, as a tensor's version does."""
    return copy.copy(leaf) if is_array(leaf) or isinstance(leaf, list) else leaf


def apart(sample: Any) -> Any:
    """Return a sample that `collate` may take apart: the containers are copies, the tensors are the same."""
    return mapped(sample, lambda _, leaf: own(leaf))


def digest(batch: Any) -> int | None:
    """Return a number that changes where a batch of any kind is written into; None where nothing tells."""
    written = io.BytesIO()
    with suppress(Exception):
        _Content(written, pickle.HIGHEST_PROTOCOL).dump(batch)
        return hash(written.getvalue())
    return None


class _Content(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and "<" in value.__qualname__:  # <locals>, <lambda>: by its name
            return str, (value.__qualname__,)
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
            return NotImplemented  # torch takes it apart
        return bytes, (value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),)  # not all of its storage


def _mapping_like(tree: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """Return a mapping of the same kind with other values; a dict where it cannot be written."""
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return made
    alike: Any = copy.copy(tree)  # keeps what a subclass carries beside its items
    items = getattr(tree, "data", None)
    if items is not None and getattr(alike, "data", None) is items:
        alike.data = dict(made)  # a UserDict's copy may share its items
    for key, value in made.items():  # a Hugging Face ModelOutput has no update
        alike[key] = value
    return alike


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)

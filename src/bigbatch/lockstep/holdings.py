"""All that a model holds and a run of it may hang on: attributes, parameters, buffers, hooks, and what is in those.

A run depends on more than its arguments. `loss_fn` chooses an adapter by an attribute, sets a condition or a mode,
registers a hook for one call; `functional_call` puts other weights in. All of that is what modules hold in their
`__dict__`, or in dicts and lists that are there, so a picture is their contents, by identity.
"""

import copy
import dataclasses
import random
import weakref
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
Place = tuple[int, Any]  # the id of a holder, and a key or number in it

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_UNREAD = ("_state_dict", "_load_state_dict", "_non_persistent")  # ... that a run does not ask for
_READ = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and not name.startswith(_UNREAD)
)
_FIXED = _OF_MODULES - {"training"}
_REGISTERED = ("_parameters", "_buffers", "_modules")
_SIMPLE = frozenset({type(None), bool, int, float, str, bytes, tuple, torch.dtype, torch.device, torch.Size})
_HOLDERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
_NOTHING_INSIDE = (Tensor, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
_MANY = 256  # of what a dict or list holds: one with more is a table
_DEEP = 3  # dicts in lists in dicts


class Held(NamedTuple):
    """A tensor in its place."""

    place: Place
    tensor: Tensor
    name: str
    registered: str | None  # as a parameter or a buffer
    quiet: bool  # whether it may change without a new version


class Strange(NamedTuple):
    """What is in an object that nobody knows from inside."""

    name: str
    there: dict[str, Any]
    content: dict[str, Any]

    @property
    def is_same(self) -> bool:
        """Whether it is as it was."""
        return holds(self.there, self.content)


class Picture:
    """What a model holds at one time. It is held by this, too, so that no other thing can look like it."""

    def __init__(self, model: nn.Module) -> None:
        """Take it."""
        self._model = model
        walk = self._walk = _Walk(model)
        self.holders: Sequence[Holder] = walk.holders
        walk.holders = []  # others may let go of some
        self.contents: Sequence[Holder] = [each.copy() for each in self.holders]
        self.tensors = tuple(self._tensors())
        self.strangers = [Strange(name, there, there.copy()) for name, there in walk.strangers]
        self._empty: list[Holder] = []
        self._dicts: list[dict[Any, Any]] = []
        self._others: list[Holder] = []
        self._lengths: list[int] = []
        self._read: list[bool] = []
        self._flat: list[Any] | None = None
        self._flatten()

    @property
    def generators(self) -> Sequence[Any]:
        """The model's own generators of random numbers."""
        return self._walk.generators

    def is_current(self) -> bool:
        """Whether the model holds the same things still. This is asked at every call, so it takes no detour."""
        if self._flat is None or any(self._empty) or [*map(len, self._dicts), *map(len, self._others)] != self._lengths:
            return False
        return all(map(is_, self._now(), self._flat))

    def changed(self) -> list[int]:
        """Return the numbers of the holders that have other contents now."""
        pairs = enumerate(zip(self.holders, self.contents, strict=True))
        return [number for number, pair in pairs if (pair[0] or pair[1]) and not holds(*pair)]

    def renewed(self, numbers: Iterable[int] | None = None) -> "Picture":
        """Return a picture of now; this one, where nothing has changed. Others may know which holders have."""
        if any(not each.is_same for each in self.strangers):
            return self._with_strangers().renewed(numbers)
        if numbers is None and self.is_current():
            return self
        changed = {number: self.holders[number].copy() for number in (self.changed() if numbers is None else numbers)}
        known = {id(value) for number in changed for _, value in entries(self.contents[number])}
        new = [value for each in changed.values() for _, value in entries(each) if id(value) not in known]
        if any(map(_is_deep, new)):
            return Picture(self._model)  # there may be more to hold than there was
        other = self.of(changed)
        other._flatten()  # noqa: SLF001 - of the same class
        return other

    def is_registered(self, number: int) -> bool:
        """Whether a holder is of parameters, buffers or modules."""
        return id(self.holders[number]) in self._walk.registered

    def of(self, contents: Mapping[int, Holder]) -> "Picture":
        """Return a picture with other contents of some holders. It is not one of now."""
        other = copy.copy(self)
        other.contents = [contents.get(number, each) for number, each in enumerate(self.contents)]
        if self._walk.inner:
            other._forget_lost()  # noqa: SLF001 - of the same class
        other.tensors = tuple(other._tensors())  # noqa: SLF001
        other._flat, other._dicts, other._others = None, [], []  # noqa: SLF001
        return other

    def _with_strangers(self) -> "Picture":
        """Return a picture with what is in other objects now."""
        other = copy.copy(self)
        other.strangers = [Strange(name, there, there.copy()) for name, there in self._walk.strangers]
        return other

    def _forget_lost(self) -> None:
        """Let go of lists and dicts that are in none of the others: they may be full of activations."""
        while True:
            there = {id(value) for content in self.contents for _, value in entries(content)}
            pairs = list(zip(self.holders, self.contents, strict=True))
            kept = [pair for pair in pairs if id(pair[0]) not in self._walk.inner or id(pair[0]) in there]
            if len(kept) == len(pairs):
                return
            self.holders, self.contents = zip(*kept, strict=True)

    def _flatten(self) -> None:
        """Have all of it in one list, to be compared in no time."""
        holders = self.holders
        self._empty = [each for each in holders if not each]
        self._dicts = [each for each in holders if each and isinstance(each, dict)]
        self._others = [each for each in holders if each and not isinstance(each, dict)]
        self._lengths = [*map(len, self._dicts), *map(len, self._others)]
        # What every module has stays in its place: the dicts are filled, not replaced.
        self._read = [key not in _FIXED or not is_own(each) for each in self._dicts for key in each]
        self._read += [True] * sum(map(len, self._others))
        self._flat = list(self._now())

    def _now(self) -> Iterator[Any]:
        return compress(chain(chain.from_iterable(map(dict.values, self._dicts)), *self._others), self._read)

    def _tensors(self) -> Iterator[Held]:
        walk = self._walk
        for holder, content in zip(self.holders, self.contents, strict=True):
            for key, value in entries(content) if content else ():
                if isinstance(value, Tensor):
                    where = id(holder)
                    name = f"{walk.names[where]}.{key}"
                    yield Held((where, key), value, name, walk.registered.get(where), where in walk.quiet)


class _Walk:
    """Goes through a model once."""

    def __init__(self, model: nn.Module) -> None:
        self.holders: list[Holder] = []
        self.names: dict[int, str] = {}  # of those who have them
        self.inner: set[int] = set()  # lists and dicts that are attributes, or in such
        self.registered: dict[int, str] = {}  # holders, and of what
        self.quiet: set[int] = set()  # holders of statistics that a run moves without a new version
        self.generators: list[Any] = []
        self.strangers: list[tuple[str, dict[str, Any]]] = []
        self._seen: set[int] = set()
        self._stack: list[tuple[Any, str, int]] = [(model, type(model).__name__, 0)]
        while self._stack:
            value, name, depth = self._stack.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._look(value, name, depth)

    def _look(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, nn.Module):
            self._look_into(value)
        elif type(value) in _HOLDERS:
            if len(value) <= _MANY:
                self.inner.add(id(value))
                self._hold(value, name, depth)
        elif isinstance(value, SimpleNamespace | Namespace) or dataclasses.is_dataclass(value):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._hold(vars(value), name, depth)
        elif isinstance(value, torch.Generator | random.Random) or type(value).__module__.startswith("numpy.random"):
            self.generators.append(value)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self.strangers.append((name, vars(value)))

    def _look_into(self, module: nn.Module) -> None:
        own, name = vars(module), type(module).__name__
        inside = [own[key] for key in _READ if key in own]
        self.holders += [own, *inside]
        self.names.update((id(each), name) for each in (own, *inside))
        for kind in _REGISTERED:
            self.registered[id(own.get(kind))] = kind
        if isinstance(module, Statistics) and module.training:
            self.quiet.add(id(own.get("_buffers")))
        self._stack += [(child, "", 0) for child in module._modules.values() if child is not None]  # noqa: SLF001
        self._note([each for each in own.items() if each[0] not in _OF_MODULES], name, 1)

    def _hold(self, holder: Holder, name: str, depth: int) -> None:
        self.holders.append(holder)
        self.names[id(holder)] = name
        if depth < _DEEP:
            self._note(entries(holder), name, depth + 1)

    def _note(self, found: Iterable[tuple[Any, Any]], name: str, depth: int) -> None:
        self._stack += [(value, f"{name}.{key}", depth) for key, value in found if _is_deep(value)]


def _is_deep(value: Any) -> bool:
    """Whether there may be more inside."""
    kind = type(value)
    return kind not in _SIMPLE and kind not in weakref.ProxyTypes and not isinstance(value, _NOTHING_INSIDE)


def entries(holder: Holder) -> Iterable[tuple[Any, Any]]:
    """Return what a holder holds, each with its key or number."""
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


def with_values(content: Holder, change: Callable[[Any], Any]) -> Holder:
    """Return a content with other values in the same places."""
    if isinstance(content, dict):
        return {key: change(value) for key, value in content.items()}
    other = content.copy()
    other.clear()
    put(other, [change(value) for value in content])
    return other


def is_own(holder: dict[Any, Any]) -> bool:
    """Tell a module's `__dict__`."""
    return "_modules" in holder


def holds(holder: Holder, content: Holder) -> bool:
    """Whether a holder has this very content."""
    if len(holder) != len(content):
        return False
    if isinstance(holder, dict) and isinstance(content, dict):
        same = all(map(is_, holder.values(), content.values()))
        return same and (is_own(holder) or all(map(is_, holder, content)))  # attributes do not change their names
    return all(map(is_, holder, content))


def put(holder: Holder, content: Holder) -> None:
    """Give a holder another content; it stays the same object, and what is right already is not touched."""
    if isinstance(holder, dict) and isinstance(content, dict):
        for key in [key for key in holder if key not in content]:
            del holder[key]
        # The order of hooks and layers is that of their calls; of attributes it is nothing, and they are never gone.
        if not is_own(holder) and list(holder) != list(content):
            holder.clear()
        for key, value in content.items():
            if key not in holder or holder[key] is not value:
                holder[key] = value
    elif isinstance(holder, list):
        holder[:] = content
    elif isinstance(holder, set):
        holder.clear()
        holder.update(content)
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(content)

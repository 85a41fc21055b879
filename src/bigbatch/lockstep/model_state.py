"""What a run of a model finds in its modules, so that a second run finds the same and leaves no trace.

Buffers that a run moves (a spectral norm's vector, a running center) and numbers that it counts are put back for the
second run. Whatever else is another thing by then was set for one call, as an adapter or a condition that `loss_fn`
chooses, and is refused: attributes are compared by identity, one level deep.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.lockstep.cannot_recompute import CannotRecompute

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTERED = ("_parameters", "_buffers", "_modules", *_HOOKS)
_SIMPLE = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_MANY = 256  # of what a dict holds: one with more is a table
_NOTHING = object()


class Place(NamedTuple):
    """Where a module holds something: the number of a dict, and a key in it."""

    holder: int
    key: Any


class Attributes:
    """What the modules of a model hold at one time."""

    def __init__(self, model: nn.Module) -> None:
        """Take note."""
        self.model = model
        self.holders: list[dict[Any, Any]] = []
        self._names: list[str] = []
        self._inner: dict[Place, int] = {}  # the numbers of dicts that are attributes
        self.of_buffers: set[int] = set()
        self.of_statistics: set[int] = set()  # of norms, which move without a new version
        for module in model.modules():
            self._look_into(module)
        self.contents: Sequence[dict[Any, Any]] = [each.copy() for each in self.holders]
        self._lengths = [*map(len, self.holders)]
        self.parameters = tuple(model.parameters())
        self.tensors = [
            (Place(number, key), value)
            for number, content in enumerate(self.contents)
            for key, value in content.items()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        ]

    def _look_into(self, module: nn.Module) -> None:
        own, name, number = vars(module), type(module).__name__, len(self.holders)
        self._hold(own, name)
        for kind in [each for each in _REGISTERED if isinstance(own.get(each), dict)]:
            if kind == "_buffers":
                self.of_buffers.add(len(self.holders))
                if isinstance(module, Statistics) and module.training:
                    self.of_statistics.add(len(self.holders))
            self._hold(own[kind], name)
        for key, value in own.items():
            if type(value) is dict and key not in _REGISTERED and 0 < len(value) <= _MANY:
                self._inner[Place(number, key)] = len(self.holders)
                self._hold(value, f"{name}.{key}")

    def _hold(self, holder: dict[Any, Any], name: str) -> None:
        self.holders.append(holder)
        self._names.append(name)

    def are_current(self) -> bool:
        """Whether all of it is the same now. Asked at every call, so it takes no detour."""
        if [*map(len, self.holders)] != self._lengths:
            return False
        now, before = (chain.from_iterable(map(dict.values, each)) for each in (self.holders, self.contents))
        return all(map(is_, now, before))

    def changed(self) -> list[Place]:
        """Return where something else is held now."""
        if self.are_current():
            return []
        return [
            Place(number, key)
            for number, (holder, content) in enumerate(zip(self.holders, self.contents, strict=True))
            for key in {**content, **holder}
            if not _alike(holder.get(key, _NOTHING), content.get(key, _NOTHING))
        ]

    def without(self, places: Sequence[Place]) -> "Attributes":
        """Return the same without some places, so that what was there may go."""
        found = object.__new__(Attributes)
        vars(found).update(vars(self))
        holders, contents = list(self.holders), list(self.contents)
        for place in places:
            contents[place.holder] = {k: v for k, v in contents[place.holder].items() if k != place.key}
            if place in self._inner:
                holders[self._inner[place]], contents[self._inner[place]] = {}, {}
        found.holders, found.contents, found.tensors = holders, contents, []
        return found

    def put_back(self) -> None:
        """Have modules hold what they held."""
        for number in {place.holder for place in self.changed()}:
            self.holders[number].clear()
            self.holders[number].update(self.contents[number])

    def name_of(self, place: Place) -> str:
        """Name a place as a person would."""
        return f"{self._names[place.holder]}.{place.key}"


class FoundState:
    """What one run finds in its model."""

    def __init__(self, attributes: Attributes, moving: frozenset[Place]) -> None:
        """Copy the buffers that runs of this model write into; `attributes` are those of now."""
        self._attributes = attributes
        self._tensors = attributes.tensors
        self._copies = {place: tensor.detach().clone() for place, tensor in self._tensors if place in moving}
        self._versions, self._own_versions = self._versions_now(), self._parameters_now()
        self._written: frozenset[Place] = frozenset()
        self._before: dict[Place, Any] = {}

    def moved(self) -> frozenset[Place]:
        """Return where the run has written into buffers."""
        statistics = self._attributes.of_statistics
        versions = zip(self._tensors, self._versions, self._versions_now(), strict=True)
        return frozenset(place for (place, _), one, other in versions if place.holder in statistics or one != other)

    def settle(self) -> None:
        """The run is over: keep what a second run needs, or raise where that is not there."""
        if self._own_versions != self._parameters_now():
            raise CannotRecompute.changes("its own parameters")
        attributes = self._attributes
        for place in self.moved():
            if place not in self._copies:
                name = attributes.name_of(place)
                raise CannotRecompute.changes(f"a buffer for some micro-batches, and not for the first, {name},")
        self._written = frozenset(attributes.changed())
        for place in self._written:
            value = attributes.contents[place.holder].get(place.key, _NOTHING)
            # Not the activations that a run before has put aside: they would be held until backward.
            if isinstance(value, _SIMPLE) or (place.holder in attributes.of_buffers and value is not _NOTHING):
                self._before[place] = value
        self._before.update(self._copies)
        self._tensors = [each for each in self._tensors if each[0] not in self._before and each[0] not in self._written]
        self._versions = self._versions_now()
        if self._written:
            self._attributes = attributes.without([*self._written])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, a second run finds what the first one found; afterwards modules hold what they hold now."""
        self._refuse_changed()
        if not self._written and not self._before:
            yield  # a run that changes nothing has changed nothing the second time
            return
        now = Attributes(self._attributes.model)
        try:
            for place, value in self._before.items():
                # A copy of a copy: backward may need what the run has read, and may be asked for again.
                again = value.clone() if place in self._copies else value
                self._attributes.holders[place.holder][place.key] = again
            yield
        finally:
            now.put_back()

    def _refuse_changed(self) -> None:
        for place in self._attributes.changed():
            if place not in self._written and place not in self._copies:
                raise CannotRecompute.between(self._attributes.name_of(place))
        if self._versions != self._versions_now():
            pairs = zip(self._tensors, self._versions, self._versions_now(), strict=True)
            place = next(place for (place, _), one, other in pairs if one != other)
            raise CannotRecompute.between(self._attributes.name_of(place))
        if self._own_versions != self._parameters_now():
            raise CannotRecompute.between("a parameter, or whether it requires a gradient,")

    def _versions_now(self) -> list[int]:
        return [_version(tensor) for _, tensor in self._tensors]

    def _parameters_now(self) -> list[tuple[int, bool]]:
        return [(_version(each), each.requires_grad) for each in self._attributes.parameters]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch's own counter


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _SIMPLE) and one == other)

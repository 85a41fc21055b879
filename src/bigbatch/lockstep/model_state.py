"""What the modules of a model hold while it runs twice: a second run must find the same, and leave no trace.

Buffers that a run moves (a spectral norm's vector, a running center) and numbers that it counts are put back for the
second run. All else must stay: what `loss_fn` sets for one call, as an adapter or a condition, is refused. Attributes
are compared by identity, one level deep.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.errors import ConfigurationError, LossError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS)  # of a module
_SIMPLE = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_MANY = 256  # of what a dict holds: one with more is a vocabulary
_NOTHING = object()
_OR_KEEP = 'Options(activations="keep"), or "offload"'
Place = tuple[int, Any]  # the number of a dict, and a key in it


class CannotRecompute(LossError, ConfigurationError):
    """A model whose activations were to be recomputed would give another gradient, or none."""

    def __init__(self, problem: str, fix: str = "") -> None:
        """Say what stands against it."""
        fix = f"{fix}; or {_OR_KEEP}" if fix else _OR_KEEP
        super().__init__(f"activations cannot be recomputed: {problem}.", fix=fix)


class ModelState:
    """What the modules of a model hold in one window, but for what its own runs write."""

    def __init__(self, model: nn.Module) -> None:
        """Take note, before a first run."""
        self._holders: list[dict[Any, Any]] = []
        self._names: list[str] = []  # of the holders, as a person would say
        self._buffers: dict[int, nn.Module] = {}  # holders that are tables of buffers, and whose
        for module in model.modules():
            name = type(module).__name__
            self._add(vars(module), name)
            for key, value in list(vars(module).items()):
                if key in _TABLES and isinstance(value, dict):
                    if key == "_buffers":
                        self._buffers[len(self._holders)] = module
                    self._add(value, name)
                elif (
                    type(value) is dict and len(value) <= _MANY and all(isinstance(v, _SIMPLE) for v in value.values())
                ):
                    self._add(value, f"{name}.{key}")
        self._contents = [each.copy() for each in self._holders]
        self._tensors = [
            ((number, key), value)
            for number, content in enumerate(self._contents)
            for key, value in content.items()
            if isinstance(value, Tensor)
        ]
        self._versions = self._versions_now()
        self._written: set[Place] = set()  # by a run itself
        self._moving: set[Place] = set()  # buffers that a run writes into; those of norms move without a new version

    def _add(self, holder: dict[Any, Any], name: str) -> None:
        self._holders.append(holder)
        self._names.append(name)

    def learn(self) -> None:
        """A first run is over: see what runs of this model write. All else is to stay as it is now."""
        self._written = set(self._changed())
        for (place, tensor), one, other in zip(self._tensors, self._versions, self._versions_now(), strict=True):
            if one != other and isinstance(tensor, nn.Parameter):
                raise CannotRecompute(f"the model changes a parameter, {self._name_of(place)}, when it runs")
            norm = self._buffers.get(place[0])
            if one != other or (isinstance(norm, Statistics) and norm.training):
                self._moving.add(place)
        for number, key in self._written:  # and not held: they may be activations that were put aside
            self._contents[number].pop(key, None)
        self._tensors = [each for each in self._tensors if each[0] not in self._written | self._moving]
        self._versions = self._versions_now()

    def refuse_changed(self) -> None:
        """Raise where modules hold something else than after the first run, or it was written into."""
        places = self._changed()
        if self._versions != (now := self._versions_now()):
            pairs = zip(self._tensors, self._versions, now, strict=True)
            places += [place for (place, _), one, other in pairs if one != other]
        if places:
            raise CannotRecompute(
                f"{self._name_of(places[0])} was changed between two runs of the model, as where loss_fn sets it for "
                "one call",
                "model(x, condition), an argument of the call",
            )

    def found(self) -> dict[Place, Any]:
        """Return what a run that begins now finds where runs write: buffers and numbers."""
        return {
            place: value.detach().clone() if place in self._moving else value
            for place, value in self._now().items()
            # Not the activations that a run before has put aside: they would be held until backward.
            if isinstance(value, _SIMPLE) or place[0] in self._buffers
        }

    @contextmanager
    def again(self, found: dict[Place, Any]) -> Iterator[None]:
        """Inside, a run finds what another one has found; afterwards modules hold what they hold now."""
        self.refuse_changed()
        now = self._now()
        try:
            # A copy of a copy: backward may need what the run has read, and may be asked for again.
            self._put({place: value.clone() if place in self._moving else value for place, value in found.items()})
            yield
        finally:
            self._put(now)

    def _now(self) -> dict[Place, Any]:
        places = self._written | self._moving
        return {(number, key): self._holders[number][key] for number, key in places if key in self._holders[number]}

    def _put(self, values: dict[Place, Any]) -> None:
        for (number, key), value in values.items():
            self._holders[number][key] = value

    def _changed(self) -> list[Place]:
        """Return where something else is held than was, but for what runs write. Asked at every call: no detours."""
        now, before = (chain.from_iterable(map(dict.values, each)) for each in (self._holders, self._contents))
        if [*map(len, self._holders)] == [*map(len, self._contents)] and all(map(is_, now, before)):
            return []
        return [
            (number, key)
            for number, (holder, content) in enumerate(zip(self._holders, self._contents, strict=True))
            if len(holder) != len(content) or not all(map(is_, holder.values(), content.values()))
            for key in {**content, **holder}
            if (number, key) not in self._written and not _alike(holder.get(key, _NOTHING), content.get(key, _NOTHING))
        ]

    def _versions_now(self) -> list[tuple[int, bool]]:
        return [(version_of(tensor), tensor.requires_grad) for _, tensor in self._tensors]

    def _name_of(self, place: Place) -> str:
        return f"{self._names[place[0]]}.{place[1]}"


def version_of(tensor: Tensor) -> int:
    """Return torch's own count of changes in place, where a tensor has one."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _SIMPLE) and one == other)

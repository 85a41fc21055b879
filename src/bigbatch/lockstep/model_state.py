"""What the modules of models hold while micro-batches take turns, or a model runs twice.

Buffers that a run moves (a spectral norm's vector, a running center) are put back for a second run. What runs write
otherwise is theirs. All else must stay: what `loss_fn` sets for one call, as an adapter or a condition, is refused.
Attributes, and what plain dicts among them hold, are compared by identity.
"""

from collections.abc import Iterator, Sequence
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
_SIMPLE = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_MANY = 256  # of what a dict holds: one with more is a vocabulary
_NOTHING = object()
_OR_KEEP = 'Options(activations="keep"), or "offload"'


class CannotRecompute(LossError, ConfigurationError):
    """A model whose activations were to be recomputed would give another gradient, or none."""

    def __init__(self, problem: str, fix: str = "") -> None:
        fix = f"{fix}; or {_OR_KEEP}" if fix else _OR_KEEP
        super().__init__(f"activations cannot be recomputed: {problem}.", fix=fix)


class OwnParameters:
    """Which parameters some models have, and in which memory.

    Micro-batches take turns in the midst of a `functional_call` or of an exchange of `p.data`. So such calls end in
    another order than they began, and leave other parameters behind.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._places = [
            (module._parameters, name, parameter, parameter.data)  # noqa: SLF001 - where functional_call puts others
            for model in models
            for module in model.modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and type(parameter.data) is Tensor  # others may have no memory of their own
        ]

    def restore(self) -> list[str]:
        """Put all of them back; returns the names of those that were others."""
        found = []
        for table, name, parameter, data in self._places:
            if table.get(name) is not parameter or parameter.data_ptr() != data.data_ptr():
                table[name], parameter.data = parameter, data
                found.append(name)
        return found


class ModelState:
    """What the modules of a model hold in one window, but for what its own runs write."""

    def __init__(self, model: nn.Module) -> None:
        """Take note, before a first run."""
        modules = [(type(module).__name__, module) for module in model.modules()]
        named = [(name, vars(module)) for name, module in modules] + [
            (name if key in _TABLES else f"{name}.{key}", value)
            for name, module in modules
            for key, value in vars(module).items()
            if key in _TABLES or (type(value) is dict and len(value) <= _MANY)
        ]
        self._names, self._tables = zip(*named, strict=True)
        self._contents = [table.copy() for table in self._tables]
        self._written: set[tuple[int, Any]] = set()  # by a run itself: the number of a table, and a key in it
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self._buffers = [
            (module, name, buffer, _version(buffer))
            for _, module in modules
            for name, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        ]
        self._moving: list[tuple[dict[str, Tensor | None], str]] = []  # tables of buffers, and names in them

    def learn(self) -> None:
        """A first run is over: see what runs of this model write. All else is to stay as it is now."""
        self._written = set(self._changed())
        for number, key in self._written:  # and not held: they may be activations that were put aside
            self._contents[number].pop(key, None)
        every, self._buffers = self._buffers, []
        for module, name, buffer, version in every:
            table = module._buffers  # noqa: SLF001
            has_moved = table.get(name) is not buffer or _version(buffer) != version
            if has_moved or (isinstance(module, Statistics) and module.training):  # they move without a new version
                self._moving.append((table, name))
            else:
                self._buffers.append((module, name, buffer, version))

    def refuse_changed(self) -> None:
        """Raise where modules hold something else than after the first run."""
        changed = [f"{self._names[number]}.{key}" for number, key in self._changed()]
        changed += [name for name, parameter, trained in self._trained if parameter.requires_grad != trained]
        changed += [name for _, name, buffer, version in self._buffers if _version(buffer) != version]
        if changed:
            raise CannotRecompute(
                f"{changed[0]} was changed between two runs of the model, as where loss_fn sets it for one call",
                "model(x, condition), an argument of the call",
            )

    def found(self) -> list[Tensor | None]:
        """Return copies of the buffers that a run which begins now finds, of those that runs move."""
        return _copied([table[name] for table, name in self._moving])

    @contextmanager
    def again(self, found: list[Tensor | None]) -> Iterator[None]:
        """Inside, a run finds what another one has found; afterwards modules hold what they hold now."""
        self.refuse_changed()
        now = [table[name] for table, name in self._moving]
        try:
            self._put(_copied(found))  # backward may need what the run has read, and may be asked for again
            yield
        finally:
            self._put(now)

    def _put(self, buffers: list[Tensor | None]) -> None:
        for (table, name), buffer in zip(self._moving, buffers, strict=True):
            table[name] = buffer

    def _changed(self) -> list[tuple[int, Any]]:
        """Return where something else is held than was, but for what runs write. Asked at every call: no detours."""
        now, before = (chain.from_iterable(map(dict.values, each)) for each in (self._tables, self._contents))
        if [*map(len, self._tables)] == [*map(len, self._contents)] and all(map(is_, now, before)):
            return []
        return [
            (number, key)
            for number, (table, content) in enumerate(zip(self._tables, self._contents, strict=True))
            for key in {**content, **table}
            if (number, key) not in self._written and not _alike(table.get(key, _NOTHING), content.get(key, _NOTHING))
        ]


def _copied(buffers: list[Tensor | None]) -> list[Tensor | None]:
    return [None if buffer is None else buffer.detach().clone() for buffer in buffers]


def _version(tensor: Tensor) -> int:
    """Return torch's own count of changes in place, where a tensor has one."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _SIMPLE) and one == other)

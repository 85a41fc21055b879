"""What a captured graph cannot see: everything that Python decided while it was captured, and other tensors' places.

A graph reads tensors by address and keeps numbers, branches and hooks as they were. So all that modules keep is
compared before each window, and a capture that draws random numbers of the host is refused.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import zip_longest
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.batch.tree import PLAIN
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.state.rng import Randomness, is_generator

# What a call of a module does not read: ways to save it, and what is set once for its class.
_UNREAD = frozenset(name for name in vars(nn.Module()) if "state_dict" in name or name == "_non_persistent_buffers_set")
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"_buffers"}  # what every module has, and no table is in
_CONTAINERS = (dict, list, tuple, set, deque)
_FEW = 64  # entries of a container that may be tables; where there are more, it is a vocabulary or the like
_MANY = 256  # entries of a container that are compared
_DEEP = 3  # containers in containers
_SMALL = 4096  # bytes of an array
# These are compared by value, or by identity where they have none; they are held, so that no other takes their place.
_COMPARED = (*PLAIN, complex, Enum, torch.dtype, torch.device, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


class Guard:
    """Tells whether what captures depend on beside their inputs is as it was."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, *, draws: bool) -> None:
        """Have compared nothing yet; `draws`: a replay may draw random numbers of the device."""
        self._models, self._device, self._draws = models, device, draws
        self._state: object = None
        self._kept: _Kept | None = None

    def changed(self, parameters: Sequence[Tensor], settings: object) -> bool:
        """Whether modes, places of tensors, attributes, hooks or `settings` are others than at the last call."""
        modules = _modules(self._models)
        own = [p for module in modules for p in module._parameters.values() if p is not None]  # noqa: SLF001 - one walk
        places = [p.data_ptr() for p in (*parameters, *own)]
        state = settings, places, [_place(table.tensor) for table in _tables(modules)], [_hooks(p) for p in own]
        before, self._state = self._state, state
        stays = self._kept is not None and self._kept.stay()
        self._kept = self._kept or _Kept(modules)
        return before != state or not stays

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Refuse a capture that no replay can repeat; where it fails modules and generators are as they were.

        It may neither replace tensors that modules keep, since replays begin with the old ones, nor draw numbers of
        the host, which would be the same ones in every replay.
        """
        modules = _modules(self._models)
        kept, before = _Kept(modules), _tables(modules)
        devices = frozenset() if self._draws else frozenset({self._device})
        numbers = Randomness(devices, kept.generators)
        try:
            yield
            _refuse_replaced(before, _tables(modules))
            # On a CPU, which has no graphs, torch's own generator is the device's.
            _refuse_drawn(numbers, torchs=not self._draws or self._device.type != "cpu")
        except BaseException:
            kept.restore()
            numbers.restore()
            raise


class _Kept:
    """What modules keep in their attributes, and in the containers and objects among them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Take it down."""
        self._modules = modules
        self._look()

    def stay(self) -> bool:
        """Whether all of it is as it was; if not, it is from now on."""
        if all(map(_holds, self._holders, self._contents)):  # the same objects: nothing is compared by value
            return True
        before = self._values
        self._look()
        return bool(before == self._values)

    def restore(self) -> None:
        """Put the same things back."""
        for holder, content in zip(self._holders, self._contents, strict=True):
            if not _holds(holder, content):
                holder.clear()
                (holder.update if isinstance(holder, dict | set) else holder.extend)(_paired(holder, content))

    def _look(self) -> None:
        self.generators: list[Any] = []
        self._holders: list[Any] = []
        self._contents: list[list[Any]] = []
        self._values: list[Any] = []
        seen: set[int] = set()
        for module in self._modules:
            own = vars(module)
            self._hold(own)
            for name, value in own.items():
                if name not in _UNREAD:
                    self._values.append(name)
                    self._note(value, 0, seen)

    def _note(self, value: Any, depth: int, seen: set[int]) -> None:
        if value is None or isinstance(value, _COMPARED):
            self._values.append(value)
        elif isinstance(value, Tensor | type | ModuleType):  # tensors are compared by their places
            self._values.append(type(value))
        elif is_generator(value):
            self.generators.append(value)
        elif hasattr(value, "tobytes"):
            self._values.append(value.tobytes() if getattr(value, "nbytes", _SMALL + 1) <= _SMALL else type(value))
        else:
            self._values.append(type(value))
            inside = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
            if isinstance(inside, _CONTAINERS) and len(inside) <= _MANY and depth < _DEEP and id(inside) not in seen:
                seen.add(id(inside))
                if not isinstance(inside, tuple):
                    self._hold(inside)
                for each in _flat(inside):
                    self._note(each, depth + 1, seen)

    def _hold(self, holder: Any) -> None:
        self._holders.append(holder)
        self._contents.append(_flat(holder))


def _flat(holder: Any) -> list[Any]:
    return [*holder, *holder.values()] if isinstance(holder, dict) else [*holder]


def _holds(holder: Any, content: list[Any]) -> bool:
    if not holder:
        return not content
    now = _flat(holder)
    return len(now) == len(content) and all(map(is_, now, content))


def _paired(holder: Any, content: list[Any]) -> Any:
    half = len(content) // 2
    return dict(zip(content[:half], content[half:], strict=True)) if isinstance(holder, dict) else content


class _Table(NamedTuple):
    """A tensor that a module keeps beside its parameters, as the angles of rotary embeddings."""

    module: nn.Module
    name: str
    tensor: Tensor


def _tables(modules: Sequence[nn.Module]) -> list[_Table]:
    found = []
    for module in modules:
        for name, kept in vars(module).items():
            if name in _TORCHS_OWN:
                continue
            if isinstance(kept, Tensor):
                found.append(_Table(module, name, kept))
            elif isinstance(kept, dict | list | tuple) and 0 < len(kept) <= _FEW:
                inside = kept.items() if isinstance(kept, dict) else ((name, each) for each in kept)
                found += [_Table(module, str(key), each) for key, each in inside if isinstance(each, Tensor)]
    # What has a graph is an activation that was put aside: no forward goes on from it, its graph is spent.
    return [table for table in found if table.tensor.grad_fn is None]


def _refuse_drawn(numbers: Randomness, *, torchs: bool) -> None:
    if numbers.drawn(torchs=torchs):
        raise NotCapturable("it draws random numbers that each replay would repeat")


def _refuse_replaced(before: list[_Table], after: list[_Table]) -> None:
    for old, new in zip_longest(before, after):
        if old is None or new is None or old.tensor is not new.tensor:
            found = new or old
            raise NotCapturable(
                f"its forward replaces a buffer or an attribute, {type(found.module).__name__}.{found.name}; write "
                "into it instead, as with buffer.copy_()"
            )


def _modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for model in models for module in model.modules()]


def _hooks(parameter: Tensor) -> object:
    """Return the keys of hooks on a parameter: each is given out once."""
    own, accumulated = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return (tuple(own or ()), tuple(accumulated or ())) if own or accumulated else None


def _place(tensor: Tensor) -> object:
    """Another tensor in the same place with the same shape is as good, since a graph reads what is there."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

"""Offloading on a CPU, with streams that do nothing before somebody waits for them.

A device may run what is on another stream as late as it is allowed to. Here it always does: a copy that is read, or
whose memory is given out again, without a wait for it gives other numbers, or is caught.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from bigbatch.lockstep import offload_evict, offload_store
from bigbatch.lockstep.activations import Activations
from bigbatch.lockstep.offload_evict import Homecoming


class Stream:
    """Things to do, in order, when somebody waits for them."""

    def __init__(self, *_: object) -> None:
        self.todo: list[Callable[[], None]] = []
        self.done = 0

    def wait_event(self, event: "Event") -> None:
        """Do it after this."""
        self.todo.append(event.happen)
        self.added()

    def wait_stream(self, other: "Stream") -> None:
        """Do it after all that is there."""
        self.todo.append(partial(other.run, len(other.todo)))
        self.added()

    def added(self) -> None:
        """Take one's time."""

    def run(self, until: int) -> None:
        """Catch up."""
        while self.done < until:
            self.done += 1
            self.todo[self.done - 1]()


class Here(Stream):
    """The stream of the computation, which has always done what it was given."""

    def added(self) -> None:
        """Do it at once."""
        self.run(len(self.todo))


class Event:
    """A point of a stream."""

    def __init__(self) -> None:
        self.happen: Callable[[], None] = _never

    def record(self, stream: Stream) -> None:
        """After what is there."""
        self.happen = partial(stream.run, len(stream.todo))


def _never() -> None:
    raise AssertionError("an event was waited for that nobody has recorded")


class _Copies(TorchFunctionMode):
    """Has copies made later."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        places = [(each.shape, each.stride(), each.storage_offset(), each.dtype, each.is_conj()) for each in args]
        memory = [StorageWeakRef(each.untyped_storage()) for each in args]
        self._stream.todo.append(partial(_copied, memory, places))
        assert kwargs == {"non_blocking": True}
        return args[0]


def _copied(memory: list[StorageWeakRef], places: list[Any]) -> None:
    tensors = []
    for reference, (shape, stride, offset, dtype, conjugate) in zip(memory, places, strict=True):
        assert not reference.expired(), "memory was given back before a copy of it was made"
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        assert storage.nbytes(), "memory was given back before a copy of it was made"
        plain = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        tensors.append(plain.conj() if conjugate else plain)
    tensors[0].copy_(tensors[1])


class LateTorch:
    """torch, with streams that take their time, and without a device to pin for."""

    def __init__(self) -> None:
        here = Here()
        self.cuda = SimpleNamespace(Stream=Stream, Event=Event, current_stream=lambda *_: here, stream=self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        with _Copies(stream):
            yield

    @staticmethod
    def empty(*sizes: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        """Make one with nothing of use in it; torch's own pool would round others than powers of two up."""
        assert not pin_memory or sizes[0] & (sizes[0] - 1) == 0
        return _spoilt(torch.empty(*sizes, **named))

    @staticmethod
    def empty_strided(*given: Any, **named: Any) -> Tensor:
        """Likewise."""
        return _spoilt(torch.empty_strided(*given, **named))


def _spoilt(tensor: Tensor) -> Tensor:
    """Have nothing of use in memory that nobody has written."""
    _spoil(tensor.untyped_storage())
    return tensor


def _spoil(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN, in every dtype


def offload_late(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Offload on the host, in small pieces, as late as can be; counts who went, who came, and who was there before."""
    late = LateTorch()
    for module in (offload_store, offload_evict):
        patch.setattr(module, "torch", late)
    patch.setattr(offload_store, "_WORTH_MOVING", 64)
    patch.setattr(offload_store, "_IN_FLIGHT", 2)
    patch.setattr(offload_store, "_SLAB", 1 << 14)
    patch.setattr(Activations, "mode", lambda _, number, **__: "keep" if number == 1 else "offload")
    counted: Counter[str] = Counter()
    empty, come_home, back = Homecoming.empty, Homecoming.come_home, offload_evict.copied_back

    def emptied(self: Homecoming, name: int) -> None:
        storage = self.absent[name][1].taken()
        if storage is not None:
            _spoil(storage)
            counted["went"] += 1
        del storage
        empty(self, name)

    def came(self: Homecoming, name: int) -> Any:
        counted["ahead"] += name in self.there
        ahead = sum(self.outs[self.absent[each][0]].bytes for each in self.there)
        counted["most"] = max(counted["most"], ahead - 2 * max(out.bytes for out in self.outs))
        found = come_home(self, name)
        counted["came"] += found is not None
        return found

    patch.setattr(Homecoming, "empty", emptied)
    patch.setattr(Homecoming, "come_home", came)
    patch.setattr(offload_evict, "copied_back", lambda tensor, *given: back(_spoilt(tensor), *given))
    return counted

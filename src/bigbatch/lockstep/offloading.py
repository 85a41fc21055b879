"""Activations in pinned host memory: copied out beside the computation, fetched ahead of it in backward."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bigbatch.lockstep.renewing import Recipes, view_of

_WORTH_MOVING = 1 << 16  # bytes; smaller tensors cost more to copy than to keep
_IN_FLIGHT = 4  # times the largest tensor: what waits to be copied out, or is fetched ahead
_SLAB = 1 << 28  # bytes of host memory that are pinned at once
_ALIGNED = 512
_FAR = 256  # how many questions ahead are looked at
_ORDERS = 8  # kinds of windows whose backward is remembered


class HostMemory:
    """Pinned host memory that is handed out piece by piece, and all of it anew in the next window.

    Pinning takes longer than copying, and torch's own pool rounds every tensor up to a power of two.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._slabs: list[Tensor] = []
        self._at = self._used = 0

    def like(self, tensor: Tensor, size: int) -> Tensor:
        """Return room for a tensor of these strides."""
        step = -(-size // _ALIGNED) * _ALIGNED
        while self._at < len(self._slabs) and self._used + step > self._slabs[self._at].numel():
            self._at, self._used = self._at + 1, 0
        if self._at == len(self._slabs):
            slab = torch.empty(max(_SLAB, step), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._slabs.append(slab)
        piece = self._slabs[self._at][self._used : self._used + size].view(tensor.dtype)
        self._used += step
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())

    @property
    def held(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.numel() for slab in self._slabs)

    def begin_anew(self) -> None:
        """Hand out all of it again."""
        self._at = self._used = 0


class _Away(NamedTuple):
    """A saved tensor in host memory."""

    number: int


class _Kept(NamedTuple):
    """A saved tensor that is too small to move."""

    tensor: Tensor
    version: int


class _Out(NamedTuple):
    host: Tensor
    bytes: int
    source: Tensor  # without its memory: it knows whether that was changed in place
    version: int


class Offload:
    """The saved tensors of one window after the other.

    Backward asks for them in an order that is the same in every window of the same tensors. The first is written down;
    in those after it, what comes next is fetched while the present one is used, and kept where it is needed once more
    before long.
    """

    def __init__(self, device: torch.device) -> None:
        """Have nothing yet."""
        self._device = device
        self._memory = HostMemory()
        self.recipes = Recipes(self._stored, self._unpacked)
        self._stream = torch.cuda.Stream(device)  # one for all windows: host memory is read before it is written again
        self._orders: dict[tuple[int, ...], list[int]] = {}
        self._begin()

    def _begin(self) -> None:
        self._out: list[_Out] = []
        self._known: dict[int, tuple[StorageWeakRef, dict[tuple[Any, ...], int]]] = {}
        self._leaving: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()
        self._leaving_bytes = self._largest = 0
        self._asked: list[int] = []  # for which tensors, in backward, so far
        self._order: list[int] | None = None  # for which it will ask
        self._there: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        """Begin with nothing, and leave nothing behind."""
        self._memory.begin_anew()
        self._begin()
        try:
            yield
            self._learn()
        finally:
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)  # what was fetched for nothing is given back after its copy
            self.recipes.forget()
            self._begin()

    @property
    def held(self) -> int:
        """Bytes of host memory that are there for it."""
        return self._memory.held

    def turn(self) -> None:
        """Say that forward is over, and backward begins."""
        for out in self._out:
            _refuse_changed(out.source, out.version)
        # What was saved last is asked for first: it need not come back.
        self._there = {number: (tensor, event) for number, tensor, event in self._leaving}
        self._leaving.clear()
        self._order = self._orders.get(self._kind)
        self._known.clear()
        self.recipes.forget()

    @property
    def _kind(self) -> tuple[int, ...]:
        return tuple([out.bytes for out in self._out])

    def _learn(self) -> None:
        """Remember in which order this window's backward has asked, if that was not known."""
        if self._asked and self._asked != self._order:
            self._orders[self._kind] = self._asked
            while len(self._orders) > _ORDERS:
                del self._orders[next(iter(self._orders))]

    def _stored(self, tensor: Tensor) -> Any:
        """Put a tensor away that the micro-batch at hand has saved."""
        size = tensor.numel() * tensor.element_size()
        whose = tensor._base if tensor._is_view() and tensor._base is not None else tensor  # noqa: SLF001 - weight.t()
        is_weight = isinstance(whose, nn.Parameter) or (whose.is_leaf and whose.requires_grad)
        if size < _WORTH_MOVING or is_weight or tensor.device != self._device or not _is_dense(tensor):
            # Without its graph: an operation that held its own result would not go before its backward.
            return _Kept(tensor.detach(), tensor._version)  # noqa: SLF001 - torch looks at it itself without hooks
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)  # noqa: SLF001 - as torch.multiprocessing has it
        if known is None or known[0].expired():
            known = self._known[storage._cdata] = (StorageWeakRef(storage), {})  # noqa: SLF001
        copies = known[1]
        view = view_of(tensor)
        if view not in copies:  # two operations may save the same tensor
            copies[view] = self._copied_out(tensor, size)
        return _Away(copies[view])

    def _copied_out(self, tensor: Tensor, size: int) -> int:
        host = self._memory.like(tensor, size)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._leaving.append((len(self._out), tensor.detach(), event))
        self._out.append(_Out(host, size, witness, tensor._version))  # noqa: SLF001
        self._leaving_bytes += size
        self._largest = max(self._largest, size)
        while self._leaving_bytes > _IN_FLIGHT * self._largest:
            self._let_go()
        return len(self._out) - 1

    def _let_go(self) -> None:
        """Give up the oldest tensor that was copied: whoever gets its memory on this stream waits for the copy."""
        number, _, event = self._leaving.popleft()
        self._leaving_bytes -= self._out[number].bytes
        torch.cuda.current_stream(self._device).wait_event(event)

    def _unpacked(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept):
            _refuse_changed(packed.tensor, packed.version)
            return packed.tensor
        number, here = packed.number, torch.cuda.current_stream(self._device)
        at = len(self._asked)
        self._asked.append(number)
        found, event = self._fetched(number)
        here.wait_event(event)
        if self._order is not None and (at >= len(self._order) or self._order[at] != number):
            self._order = None  # another way this time: one after the other, and nothing ahead
            for _, fetched in self._there.values():
                here.wait_event(fetched)  # their memory is given out again: not before it was filled
            self._there.clear()
        if self._order is None:
            self._there.pop(number, None)
        else:
            self._fetch_ahead(at, self._order)
        return found

    def _fetch_ahead(self, at: int, order: list[int]) -> None:
        """Fetch what is asked for next, up to a limit; of what is there keep that alone."""
        room = _IN_FLIGHT * self._largest
        soon: dict[int, None] = {}
        for number in order[at + 1 : at + 1 + _FAR]:
            if number not in soon:
                room -= self._out[number].bytes
                if room < 0:
                    break
                soon[number] = None
        if order[at] not in soon:
            self._there.pop(order[at], None)
        for number in soon:
            self._fetched(number)

    def _fetched(self, number: int) -> tuple[Tensor, torch.cuda.Event]:
        """Bring a tensor back, if it is not there."""
        if number in self._there:
            return self._there[number]
        host = self._out[number].host
        there = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still use that memory
        with torch.cuda.stream(self._stream):
            there.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._there[number] = there, event
        return there, event


def _refuse_changed(tensor: Tensor, version: int) -> None:
    if tensor._version != version:  # noqa: SLF001
        msg = (
            "one of the variables needed for gradient computation has been modified by an inplace operation: it was "
            f"saved at version {version} and is now at {tensor._version}"  # noqa: SLF001
        )
        raise RuntimeError(msg)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy with the same strides holds what it holds, and nothing else."""
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True

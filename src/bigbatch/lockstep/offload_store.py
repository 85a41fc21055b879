"""Activations in pinned host memory: copied out beside the computation, fetched ahead of it in backward."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bigbatch.lockstep.offload_evict import Fetcher, Held, Holdings, Homecoming, Out, Saved, name_of
from bigbatch.lockstep.offload_remake import Recipes, view_of
from bigbatch.state import scope

_WORTH_MOVING = 1 << 16  # bytes; smaller tensors cost more to copy than to keep
_IN_FLIGHT = 4  # times the largest tensor: what waits to be copied out, or is fetched ahead
_IN_FLIGHT_SPARING = 2
_COMING_HOME = 2  # likewise: what comes back before its micro-batch goes on
_ORDERS = 24  # kinds of forwards and backwards that are remembered
_SLAB = 1 << 28  # bytes that are pinned at once, at least
_PIECES = 4  # that a slab holds, at least: what is left at its end is a small part of it
_ALIGNED = 512


class HostMemory:
    """Pinned host memory that is handed out piece by piece, and all of it anew in the next window.

    Pinning takes longer than copying, and torch's own pool rounds every tensor up to a power of two: so slabs are one.
    """

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._left: list[int] = []  # bytes of each that are not used

    @property
    def held(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.numel() for slab in self._slabs)

    def begin_anew(self) -> None:
        """Hand out all of it again."""
        self._left = [slab.numel() for slab in self._slabs]

    def like(self, tensor: Tensor, size: int) -> Tensor:
        """Return room for a tensor of these strides."""
        step = -(-size // _ALIGNED) * _ALIGNED
        place = next((number for number, left in enumerate(self._left) if left >= step), len(self._slabs))
        if place == len(self._slabs):
            number = 1 << (max(_SLAB, _PIECES * step) - 1).bit_length()
            self._slabs.append(torch.empty(number, dtype=torch.uint8, device="cpu", pin_memory=True))
            self._left.append(number)
        slab, begin = self._slabs[place], self._slabs[place].numel() - self._left[place]
        self._left[place] -= step
        piece: Tensor = slab[begin : begin + size].view(tensor.dtype)
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())


class Offload:
    """The saved tensors of one window after the other, and what micro-batches leave behind while they wait."""

    def __init__(self, device: torch.device, *, sparing: bool = False) -> None:
        """Have nothing yet; `sparing` less is under way at once."""
        self._device = device
        self._under_way = _IN_FLIGHT_SPARING if sparing else _IN_FLIGHT
        self.memory = HostMemory()
        self.recipes = Recipes(self._stored, self._unpacked)
        # Each one for all windows: host memory is read before it is written again.
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._orders: dict[tuple[int, ...], list[int]] = {}
        self._begin(None, tuple)

    def _begin(self, limit: int | None, kept: Callable[[], Iterable[Tensor]]) -> None:
        self._outs: list[Out] = []
        self._largest = 0
        self._leaving: deque[tuple[int, Tensor]] = deque()
        self._leaving_bytes = 0
        self._kind: tuple[int, ...] = ()  # the sizes of what was saved, by which windows are alike
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event]]] = {}  # where gradients have been, and read when
        self._coming_home = Homecoming(self._device, self._inward, self._outs)
        # A loss may be looked at before it goes back.
        self._begin_half(Fetcher(self._device, self._inward, self._outs, 0), Holdings(limit, kept))

    def _begin_half(self, fetcher: Fetcher, holdings: Holdings) -> None:
        self._fetcher, self._holdings = fetcher, holdings
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}  # copies, by memory and view
        self.recipes.forget()

    @contextmanager
    def window(self, limit: int | None = None, kept: Callable[[], Iterable[Tensor]] = tuple) -> Iterator[None]:
        """Begin with nothing, and leave nothing behind.

        Beyond `limit` bytes micro-batches wait without what they hold, but for the memory of what is `kept`.
        """
        self._outward.wait_stream(self._inward)
        here = torch.cuda.current_stream(self._device)
        for stream in (self._outward, self._inward):
            stream.wait_stream(here)  # a part of what is captured, where this is
        self.memory.begin_anew()
        self._begin(limit, kept)
        try:
            yield
            if self._fetcher.asked != self._fetcher.order:  # remember in which order this window has asked
                self._orders[self._kind] = self._fetcher.asked
            while len(self._orders) > _ORDERS:
                del self._orders[next(iter(self._orders))]
        finally:
            for stream in (self._outward, self._inward):
                here.wait_stream(stream)  # what was fetched for nothing is given back after its copy
            self._begin(None, tuple)

    def turn(self) -> None:
        """Say that forward is over, and backward begins."""
        self._kind = tuple([out.bytes for out in self._outs])
        room, order = self._under_way * self._largest, self._orders.get(self._kind)
        fetcher = Fetcher(self._device, self._inward, self._outs, room, order)
        # What was saved last is asked for first: it need not come back.
        fetcher.there = {number: (tensor, self._outs[number].copied) for number, tensor in self._leaving}
        self._leaving.clear()
        self._leaving_bytes = 0
        self._begin_half(fetcher, Holdings(self._holdings.limit, self._holdings.kept))

    def _stored(self, tensor: Tensor) -> Saved | int:
        """Put a tensor away that the micro-batch at hand has saved; returns the number of its copy, if it has one."""
        size = tensor.numel() * tensor.element_size()
        if size < _WORTH_MOVING or tensor.device != self._device or _is_weight(tensor) or not _is_dense(tensor):
            # Without its graph: an operation that held its own result would not go before its backward.
            return Saved(tensor.detach(), tensor._version)  # noqa: SLF001
        seen = name_of(tensor), view_of(tensor)
        if seen not in self._known:  # two operations may save the same tensor
            host = self.memory.like(tensor, size)
            number = self._copied_out(tensor, host, size, Saved.without_memory(tensor))
            self._known[seen] = StorageWeakRef(tensor.untyped_storage()), number  # by which no other has its name
        number = self._known[seen][1]
        worker = scope.worker()
        if worker is not None and not tensor.is_leaf:  # a leaf may be everybody's
            self._holdings.add(worker.number, tensor, number)
        return number

    def _copied_out(self, tensor: Tensor, host: Tensor, size: int, saved: Saved | None = None) -> int:
        here = torch.cuda.current_stream(self._device)
        self._outward.wait_stream(here)
        with torch.cuda.stream(self._outward):
            host.copy_(tensor.detach(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._outward)
        number = len(self._outs)
        self._outs.append(Out(host, size, event, saved))
        self._leaving.append((number, tensor.detach()))
        self._leaving_bytes += size
        self._largest = max(self._largest, size)
        while self._leaving_bytes > self._under_way * self._largest:
            # Give up the oldest that was copied: whoever gets its memory on this stream waits for the copy.
            oldest, leaving = self._leaving.popleft()
            self._leaving_bytes -= self._outs[oldest].bytes
            here.wait_event(self._outs[oldest].copied)
            self._empty(name_of(leaving))
        return number

    def _empty(self, name: int) -> None:
        """Give up a piece of memory whose holder is absent, unless it is still copied: two views of it may be saved."""
        may_go = name in self._coming_home.absent and name not in self._holdings.staying
        if may_go and all(name_of(each) != name for _, each in self._leaving):
            self._coming_home.empty(name)

    def _unpacked(self, packed: Saved | int) -> Tensor:
        saved = packed if isinstance(packed, Saved) else self._outs[packed].saved
        if saved is not None and saved.is_changed:
            msg = (
                "one of the variables needed for gradient computation has been modified by an inplace operation: it "
                f"was saved at version {saved.version} and is now at {saved.source._version}"  # noqa: SLF001
            )
            raise RuntimeError(msg)
        return packed.source if isinstance(packed, Saved) else self._fetcher.ask(packed)

    @contextmanager
    def waiting(self, worker: Any, gradient: Tensor | None = None, beside: int = 0) -> Iterator[bool]:
        """Have a micro-batch wait inside of this, without the memory of what it holds where others need that.

        Yields whether it does; then it need not hold the `beside` bytes either that it can ask for again. A `gradient`
        that it has come with must not be another's. Nobody may look at what it has meanwhile.
        """
        if gradient is not None and gradient.numel() * gradient.element_size() >= _WORTH_MOVING:
            self._holdings.add(worker.number, gradient)
        shared = (tensor for tensor, _ in worker.round.shared)
        left: list[Held] = []  # where the host has no more room, those until then
        try:
            for each in self._holdings.leaving(worker.number, worker.size, beside, shared):
                saved = None if each.number is None else self._outs[each.number].saved
                if saved is None or not saved.is_changed:  # else its copy is not of what it holds now
                    number = self._gradient_copied_out(each) if each.number is None else each.number
                    self._coming_home.absent[each.reference.cdata] = number, each
                    left.append(each)
                    self._empty(each.reference.cdata)
            yield bool(left)
        finally:
            for each in left:
                out = self._outs[self._coming_home.absent[each.reference.cdata][0]]
                read = self._coming_home.come_home(each.reference.cdata)
                if each.number is None and read is not None:
                    self._free.setdefault(out.bytes, []).append((out.host, read))
            # Also for the first one who was away, when those before it go on.
            self._coming_home.fetch_ahead(_COMING_HOME * self._largest)

    def _gradient_copied_out(self, held: Held) -> int:
        """Copy a gradient, now: the next time it may have another added to it."""
        storage = held.taken()
        assert storage is not None  # noqa: S101 - it was seen to live
        tensor = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        size = storage.nbytes()
        if self._free.get(size):
            host, read = self._free[size].pop()
            self._outward.wait_event(read)
        else:
            host = self.memory.like(tensor, size)
        return self._copied_out(tensor, host, size)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf with a gradient, or a view of one, as weight.t() is."""
    whose = tensor._base if tensor._is_view() and tensor._base is not None else tensor  # noqa: SLF001
    return whose.is_leaf and (whose.requires_grad or isinstance(whose, nn.Parameter))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy with the same strides holds what it holds, and nothing else: torch keeps those, and no others."""
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()

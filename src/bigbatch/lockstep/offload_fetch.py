"""Tensors in host memory that are fetched before they are asked for, since one window asks as the other did."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_FAR = 256  # how many questions ahead are looked at


class Saved(NamedTuple):
    """A saved tensor, without its memory where that has gone: it knows whether it was changed in place."""

    source: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written into it since."""
        return self.source._version != self.version  # noqa: SLF001 - torch looks at it itself without hooks


class Out(NamedTuple):
    """A tensor that was copied to the host."""

    host: Tensor
    bytes: int
    copied: torch.cuda.Event
    saved: Saved | None = None  # None: a gradient


class Held(NamedTuple):
    """A piece of memory, as long as somebody else holds it, and the number of its copy on the host if there is one."""

    reference: StorageWeakRef
    number: int | None

    def taken(self) -> torch.UntypedStorage | None:
        """Return the memory, if it is still there."""
        found: torch.UntypedStorage | None = None
        if not self.reference.expired():  # nobody else runs meanwhile
            found = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)  # noqa: SLF001 - as multiprocessing has it
        return found


class Fetcher:
    """What comes back from the host while one forward or one backward runs, on a stream of its own.

    Questions come in an order that is the same in every window of the same tensors. The first is written down; in those
    after it, what comes next is fetched while the present one is used, up to `room` bytes, and kept where it is needed
    once more before long.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, outs: list[Out], room: int) -> None:
        """Have nothing there yet."""
        self._device, self._stream, self._outs, self.room = device, stream, outs, room
        self.there: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self.order: list[int] | None = None  # in which questions will come
        self.asked: list[int] = []  # so far
        self._looked = 0  # how far ahead in that order everything is there
        self._soon: dict[int, int] = {}  # what is asked for until then, and how often
        self._ahead = 0  # bytes of it

    def ask(self, number: int) -> Tensor:
        """Return a tensor, for use on the present stream."""
        here = torch.cuda.current_stream(self._device)
        at = len(self.asked)
        self.asked.append(number)
        found, event = self._fetched(number, here)
        here.wait_event(event)
        if self.order is not None and (at >= len(self.order) or self.order[at] != number):
            self.order = None  # another way this time: one after the other, and nothing ahead
            for _, fetched in self.there.values():
                here.wait_event(fetched)  # their memory is given out again: not before it was filled
            self.there.clear()
            self._soon.clear()
        if self.order is not None:
            if at >= self._looked:
                self._looked = at + 1
            else:
                self._is_soon_no_more(number)
            self.fetch_ahead(here)
        if number not in self._soon:
            self.there.pop(number, None)
        return found

    def fetch_ahead(self, here: torch.cuda.Stream | None = None) -> None:
        """Fetch what is asked for next, if that is known, up to a limit; what was fetched for it is not looked at."""
        if self.order is None:
            return
        last = min(len(self.order), len(self.asked) + _FAR)
        while self._looked < last:
            number = self.order[self._looked]
            if number not in self._soon:
                if not self._is_away(number) or self._ahead + self._outs[number].bytes > self.room:
                    return
                here = here or torch.cuda.current_stream(self._device)
                self._fetched(number, here)
                self._ahead += self._outs[number].bytes
                self._soon[number] = 0
            self._soon[number] += 1
            self._looked += 1

    def _is_soon_no_more(self, number: int) -> None:
        self._soon[number] -= 1
        if not self._soon[number]:
            del self._soon[number]
            self._ahead -= self._outs[number].bytes

    def _fetched(self, number: int, here: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        """Bring a tensor back, if it is not there."""
        if number not in self.there:
            out = self._outs[number]
            there = self._room_for(number, out)
            self._stream.wait_stream(here)  # which may still use that memory
            self._stream.wait_event(out.copied)
            with torch.cuda.stream(self._stream):
                there.copy_(out.host, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
            self.there[number] = there, event
        return self.there[number]

    def _is_away(self, number: int) -> bool:
        return number < len(self._outs)

    def _room_for(self, _: int, out: Out) -> Tensor:
        host = out.host
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)


class Homecoming(Fetcher):
    """Tensors that live on without their memory, and get it back: whoever holds one finds it as it was."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, outs: list[Out], room: int) -> None:
        """Have nobody away."""
        super().__init__(device, stream, outs, room)
        self._homes: dict[int, Held] = {}

    def empty(self, number: int, home: Held) -> None:
        """Give up the memory of a tensor that has been copied out, if there still is one."""
        storage = home.taken()
        if storage is not None:
            self._homes[number] = home
            storage.resize_(0)

    def come_home(self, number: int) -> torch.cuda.Event | None:
        """Have a tensor's memory back, for use on the present stream; returns when its copy was read."""
        event = None
        if self._is_away(number):
            event = self._fetched(number, torch.cuda.current_stream(self._device))[1]
            self.ask(number)
            self.there.pop(number, None)
            if self.order is not None and number in self._soon:
                # It may leave once more before it is asked for again: then it is to be fetched again, too.
                at = self.order.index(number, len(self.asked))
                for each in self.order[at : self._looked]:
                    self._is_soon_no_more(each)
                self._looked = at
        self._homes.pop(number, None)
        return event

    def _is_away(self, number: int) -> bool:
        return number in self._homes and not self._homes[number].reference.expired()

    def _room_for(self, number: int, out: Out) -> Tensor:
        home = self._homes[number].taken()
        assert home is not None  # noqa: S101 - it was seen to live
        home.resize_(out.bytes)
        host = out.host
        return torch.empty(0, dtype=host.dtype, device=self._device).set_(home, 0, host.shape, host.stride())

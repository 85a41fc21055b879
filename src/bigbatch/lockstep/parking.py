"""Gradients that wait at a meeting, in pinned host memory.

Where a window has many micro-batches, each waits at every norm with the gradient that it has come there with, and often
that of a shortcut as well: together more than one micro-batch's activations. A part of them waits elsewhere. Autograd
holds such a gradient while its backward waits, so the tensor stays, and its memory alone goes and comes back; whoever
else holds it, as the shortcut may, finds it as it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

_WORTH_MOVING = 1 << 20  # bytes: less is not what fills a device
_EVERY = 4  # of as many micro-batches one parks: that makes enough room, and all would copy four times as much
_LEAVING = 1  # copies that the next micro-batch does not wait for


class _Parked(NamedTuple):
    storage: torch.UntypedStorage
    size: int
    event: torch.cuda.Event


class Parking:
    """Host memory for one gradient of some micro-batches."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Copy on a stream of its own."""
        self._device, self._stream = device, stream
        self._places: dict[int, Tensor] = {}
        self._leaving: list[_Parked] = []

    @property
    def held(self) -> int:
        """Bytes that are pinned."""
        return sum(place.numel() for place in self._places.values())

    @contextmanager
    def parked(self, number: int, tensor: Tensor) -> Iterator[None]:
        """Have the memory of a micro-batch's tensor wait elsewhere, until this is left.

        Nobody may look at it meanwhile, so it must be this micro-batch's alone.
        """
        away = self._leave(number, tensor) if number % _EVERY == 1 else None
        try:
            yield
        except BaseException:
            self._forget(away)  # a window that has failed: nobody will ask for it
            raise
        if away is not None and not self._forget(away):
            self._come_back(number, away)

    def _leave(self, number: int, tensor: Tensor) -> _Parked | None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < _WORTH_MOVING or tensor.device != self._device or not storage.resizable():
            return None
        place = self._places.get(number)
        if place is None or place.numel() < size:
            self._places[number] = place = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            place[:size].copy_(_bytes(storage), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        found = _Parked(storage, size, event)
        self._leaving.append(found)
        while len(self._leaving) > _LEAVING:
            left = self._leaving.pop(0)
            here.wait_event(left.event)  # whoever gets that memory here comes after the copy
            left.storage.resize_(0)
        return found

    def _forget(self, away: _Parked | None) -> bool:
        """Let it stay where it is, if nobody has come after it; returns whether it has."""
        stays = [each for each in self._leaving if each is away]
        self._leaving = [each for each in self._leaving if each is not away]
        for each in stays:
            torch.cuda.current_stream(self._device).wait_event(each.event)  # before its memory is another's
        return bool(stays)

    def _come_back(self, number: int, away: _Parked) -> None:
        here = torch.cuda.current_stream(self._device)
        away.storage.resize_(away.size)
        self._stream.wait_stream(here)  # which may still use that memory
        with torch.cuda.stream(self._stream):
            _bytes(away.storage).copy_(self._places[number][: away.size], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        here.wait_event(event)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return all of a tensor's memory, as a tensor that knows nothing of versions."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""What leaves the device while micro-batches wait, and comes back before it is asked for.

Saved tensors go to the host, and are fetched ahead in backward: one window asks as the other did. Each of many
micro-batches comes to a norm with a large tensor, and often with that of a shortcut as well: together more than all
activations of one. So beyond a limit, whichever their number, micro-batches leave the memory of what they hold behind.
In forward the host has a copy anyway; in backward a gradient is copied out and back. The tensors themselves stay:
autograd and the model's own code hold them, and find them as they were.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_FAR = 256  # how many questions ahead are looked at
_PLAIN = frozenset({Tensor, nn.Parameter})
_FEW = 8  # operations: more are a layer's


class Saved(NamedTuple):
    """A saved tensor, without its memory where that has gone: it knows whether it was changed in place."""

    source: Tensor
    version: int

    @classmethod
    def without_memory(cls, tensor: Tensor) -> "Saved":
        """Return what tells of a tensor, and holds nothing."""
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return cls(witness, tensor._version)  # noqa: SLF001

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
    """A piece of memory, as long as somebody else holds it, and the number of its copy on the host if there is one.

    No other piece gets its name while it is referred to.
    """

    reference: StorageWeakRef
    number: int | None

    def taken(self) -> torch.UntypedStorage | None:
        """Return the memory, if it is still there."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)  # noqa: SLF001 - as multiprocessing has it
        return found


def name_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from all other that is referred to."""
    name: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - as torch.multiprocessing has it
    return name


@dataclass
class Fetcher:
    """Saved tensors that come back while a backward runs, on a stream of its own.

    Questions come in an order that is the same in every window of the same tensors. The first is written down; in those
    after it, what comes next is fetched while the present one is used, up to `room` bytes, and kept where it is needed
    once more before long.
    """

    device: torch.device
    stream: torch.cuda.Stream
    outs: list[Out]
    room: int
    order: list[int] | None = None  # in which questions will come
    asked: list[int] = field(default_factory=list)  # so far
    there: dict[int, tuple[Tensor, torch.cuda.Event]] = field(default_factory=dict)
    _looked: int = 0  # how far ahead in that order everything is there
    _soon: dict[int, int] = field(default_factory=dict)  # what is asked for until then, and how often
    _ahead: int = 0  # bytes of it

    def ask(self, number: int) -> Tensor:
        """Return a tensor, for use on the present stream."""
        here = torch.cuda.current_stream(self.device)
        at = len(self.asked)
        self.asked.append(number)
        found, event = self._fetched(number, here)
        here.wait_event(event)
        if self.order is not None and self.order[at : at + 1] != [number]:
            self.order = None  # another way this time: one after the other, and nothing ahead
            for _, fetched in self.there.values():
                here.wait_event(fetched)  # their memory is given out again: not before it was filled
            self.there.clear()
            self._soon.clear()
        if self.order is not None:
            if at >= self._looked:
                self._looked = at + 1
            else:
                self._soon[number] -= 1
                if not self._soon[number]:
                    del self._soon[number]
                    self._ahead -= self.outs[number].bytes
            self._fetch_ahead(self.order, here)
        if number not in self._soon:
            self.there.pop(number, None)
        return found

    def _fetch_ahead(self, order: list[int], here: torch.cuda.Stream) -> None:
        """Fetch what is asked for next, up to a limit; what was fetched for it is not looked at."""
        for number in order[self._looked : len(self.asked) + _FAR]:
            if number not in self._soon:
                if self._ahead + self.outs[number].bytes > self.room:
                    return
                self._fetched(number, here)
                self._ahead += self.outs[number].bytes
                self._soon[number] = 0
            self._soon[number] += 1
            self._looked += 1

    def _fetched(self, number: int, here: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        """Bring a tensor back, if it is not there."""
        if number not in self.there:
            out = self.outs[number]
            found = torch.empty_strided(out.host.shape, out.host.stride(), dtype=out.host.dtype, device=self.device)
            self.there[number] = found, copied_back(found, out, self.stream, here)
        return self.there[number]


@dataclass
class Homecoming:
    """Memory that micro-batches do without while they wait; whoever holds a tensor in it finds it as it was.

    It comes back in the order in which it left, since micro-batches take turns in theirs.
    """

    device: torch.device
    stream: torch.cuda.Stream
    outs: list[Out]
    absent: dict[int, tuple[int, Held]] = field(default_factory=dict)  # by its name: the number of its copy
    # What is back ahead of its micro-batch: held, lest its memory be given out again before it was filled.
    there: dict[int, tuple[Tensor, torch.cuda.Event]] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)

    def empty(self, name: int) -> None:
        """Give up a piece of memory that has been copied out, if there still is one."""
        storage = self.absent[name][1].taken()
        if storage is not None:
            self._gone.add(name)
            storage.resize_(0)

    def come_home(self, name: int) -> torch.cuda.Event | None:
        """Have a piece of memory back, for use on the present stream; returns when its copy was read."""
        here = torch.cuda.current_stream(self.device)
        self._fetch(name, here)
        _, event = self.there.pop(name, (None, None))
        if event is not None:
            here.wait_event(event)
        del self.absent[name]
        return event

    def fetch_ahead(self, room: int) -> None:
        """Fetch the next so many bytes."""
        here = torch.cuda.current_stream(self.device)
        for name, (number, _) in self.absent.items():
            if name in self._gone or name in self.there:
                room -= self.outs[number].bytes
                if room < 0:
                    return
                self._fetch(name, here)

    def _fetch(self, name: int, here: torch.cuda.Stream) -> None:
        number, held = self.absent[name]
        storage = held.taken() if name in self._gone else None
        if storage is not None:
            host = self.outs[number].host
            storage.resize_(self.outs[number].bytes)
            tensor = torch.empty(0, dtype=host.dtype, device=self.device).set_(storage, 0, host.shape, host.stride())
            self.there[name] = tensor, copied_back(tensor, self.outs[number], self.stream, here)
        self._gone.discard(name)


def copied_back(tensor: Tensor, out: Out, stream: torch.cuda.Stream, here: torch.cuda.Stream) -> torch.cuda.Event:
    """Copy what is on the host into a tensor, beside the computation; returns when that is done."""
    stream.wait_stream(here)  # which may still use that memory
    stream.wait_event(out.copied)
    with torch.cuda.stream(stream):
        tensor.copy_(out.host, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return event


@dataclass
class Holdings:
    """The memory that each micro-batch is known to hold."""

    limit: int | None  # bytes that may wait on the device
    kept: Callable[[], Iterable[Tensor]]  # tensors whose memory stays, whoever waits
    _of: defaultdict[int, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))
    staying: dict[int, Held] = field(default_factory=dict)  # what more than one has come with, by its name
    _known: tuple[list[Tensor], list[int], set[int]] = ([], [], set())  # what was kept, where, and its memory

    def add(self, worker: int, tensor: Tensor, number: int | None = None) -> None:
        """Know of a tensor that a micro-batch has for itself alone, where its memory can go and come back."""
        storage = tensor.untyped_storage()
        # Memory that is all of this tensor, value by value.
        plain = not tensor.is_conj() and not tensor.is_neg() and not tensor.storage_offset()
        is_all = plain and storage.nbytes() == tensor.numel() * tensor.element_size() and storage.resizable()
        if self.limit is None or not is_all or _is_of_weights(tensor):
            return
        name, held = name_of(tensor), Held(StorageWeakRef(storage), number)
        if any(name in each for other, each in self._of.items() if other != worker):
            self.staying[name] = held
        self._of[worker][name] = held

    def leaving(self, worker: int, workers: int, beside: int, shared: Iterable[Tensor] = ()) -> list[Held]:
        """Return what a micro-batch leaves behind, `beside` being bytes that it can do without anyway.

        Of all `workers`, which hold about the same, as many leave as must, one here and one there; none leaves what is
        `shared` by all.
        """
        if self.limit is None:
            return []
        every = self._of[worker]
        sizes = {name: there.nbytes() for name in every for there in [every[name].taken()] if there is not None}
        mine = self._of[worker] = {name: every[name] for name in sizes}
        share = 1 - self.limit / max(workers * (beside + sum(sizes.values())), 1)
        if share <= 0 or int((worker + 1) * share) == int(worker * share):
            return []
        now = list(self.kept())  # they are looked at every time, but their memory takes longer
        places = [each.data_ptr() if type(each) in _PLAIN else name_of(each) for each in now]
        if places != self._known[1]:  # of tensors that are held: no other is in the place of one
            self._known = now, places, set(map(name_of, now))
        staying = self._known[2].union(map(name_of, shared), self.staying)
        return [each for name, each in mine.items() if name not in staying]


def _is_of_weights(tensor: Tensor) -> bool:
    """Whether a tensor is made of weights alone, in a few steps: autocast keeps its casts for all micro-batches."""
    nodes = [tensor.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _FEW:  # of something that no gradient goes to, as samples are
            return False
        nodes += [below for below, _ in node.next_functions]
    return True

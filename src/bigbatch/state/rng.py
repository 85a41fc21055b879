"""Random numbers of micro-batches that take turns: each has a stream of its own.

Generators are the process's, not a thread's. If all micro-batches drew from one stream in turn, a checkpoint that runs
one of them again would not find the numbers that it drew the first time, between which the others drew theirs. So each
has its own, derived from the generator's state at the start of the window: the same state gives the same numbers.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SEED_BYTES = 8


class Streams:
    """The generators' states of all micro-batches of a window; only one is in force at a time."""

    def __init__(self, devices: frozenset[torch.device], number: int) -> None:
        """Derive a stream for each micro-batch; the generators are left as they are."""
        self._generators = [torch.default_generator, *_on(devices)]
        self._before = [generator.get_state() for generator in self._generators]
        self._drawn = [False] * len(self._generators)
        self._left: list[Tensor] | None = None  # where the latest forward to end has left them
        digests = [hashlib.sha256(state.numpy().tobytes()).digest() for state in self._before]
        self._seeds = [[_seed(digest, each) for digest in digests] for each in range(number)]

    def begin(self, number: int) -> None:
        """Put a micro-batch's stream in force, from its beginning."""
        for generator, seed in zip(self._generators, self._seeds[number], strict=True):
            generator.manual_seed(seed)

    def state(self) -> list[Tensor]:
        """Return how far the stream in force has come."""
        return [generator.get_state() for generator in self._generators]

    def go_on(self, state: Sequence[Tensor]) -> None:
        """Put a stream in force where it was left."""
        for generator, each in zip(self._generators, state, strict=True):
            generator.set_state(each)

    def sources(self) -> "list[Source]":
        """Return the generators, each as a source."""
        return [Source(each.get_state, each.set_state) for each in self._generators]

    def end(self, number: int) -> None:
        """Note which generators a micro-batch has drawn from by now."""
        now = self.state()
        self.begin(number)
        for place, (state, start) in enumerate(zip(now, self.state(), strict=True)):
            self._drawn[place] = self._drawn[place] or not torch.equal(state, start)
        self.go_on(now)
        self._left = now

    def close(self) -> None:
        """Put the generators back; one that was drawn from goes on by a number, lest the next window draw the same.

        Those who draw may be in backward, as noise on gradients is, or on another thread.
        """
        for place, (now, left) in enumerate(zip(self.state(), self._left or (), strict=self._left is not None)):
            self._drawn[place] = self._drawn[place] or not torch.equal(now, left)
        self.go_on(self._before)
        for generator, drawn in zip(self._generators, self._drawn, strict=True):
            if drawn:
                torch.rand((), generator=generator, device=generator.device)


class Draws:
    """What one run draws, so that another draws the same: of torch's, Python's, numpy's and its model's own numbers."""

    def __init__(self, streams: Streams, own: Sequence[Any] = ()) -> None:
        """Note where all generators are before the run; `own` are the model's, of any kind."""
        self._sources = [*streams.sources(), *_of_others(own)]
        self._before = [source.state() for source in self._sources]
        self._after: list[Any] = []
        self._drew = False
        self.differed = False  # whether another run has drawn other numbers

    def settle(self) -> None:
        """The run is over: note where they are now."""
        self._after = [source.state() for source in self._sources]
        self._drew = not all(map(_alike, self._before, self._after))

    @property
    def drew(self) -> bool:
        """Whether the run has drawn any."""
        return self._drew

    def put_back(self) -> None:
        """Have all generators where they were before the run."""
        self._go_on(self._before)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside, and go on afterwards where all generators are now."""
        if not self._drew:
            yield
            return
        now = [source.state() for source in self._sources]
        self._go_on(self._before)
        try:
            yield
            for source, before, after in zip(self._sources, self._before, self._after, strict=True):
                found = source.state()
                # A run that draws nothing is none the worse for a thread that did.
                self.differed = self.differed or (not _alike(found, after) and not _alike(found, before))
        finally:
            self._go_on(now)

    def _go_on(self, states: Sequence[Any]) -> None:
        for source, state in zip(self._sources, states, strict=True):
            source.go_on(state)


class Source(NamedTuple):
    """A generator of any kind."""

    state: Callable[[], Any]
    go_on: Callable[[Any], object]


def _of_others(own: Sequence[Any]) -> Iterator[Source]:
    yield Source(random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield Source(numpy.random.get_state, numpy.random.set_state)
    for each in own:
        if isinstance(each, torch.Generator):
            yield Source(each.get_state, each.set_state)
        elif isinstance(each, random.Random):
            yield Source(each.getstate, each.setstate)
        elif hasattr(each, "get_state"):  # numpy's older kind
            yield Source(each.get_state, each.set_state)
        elif hasattr(each, "bit_generator"):
            bits = each.bit_generator
            yield Source(partial(getattr, bits, "state"), partial(setattr, bits, "state"))


def _alike(one: Any, other: Any) -> bool:
    """Whether two states are the same; they are tensors, or numbers and arrays in tuples or dicts."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and hasattr(one[1], "tobytes"):  # numpy's; Python's are numbers alone
        return all(map(_alike, one, other))
    return one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else bool(one == other)


def _on(devices: frozenset[torch.device]) -> list[torch.Generator]:
    numbers = sorted(torch.device(d).index or 0 for d in devices if d.type == "cuda")
    return [torch.cuda.default_generators[number] for number in numbers]


def _seed(digest: bytes, number: int) -> int:
    found = hashlib.sha256(digest + number.to_bytes(_SEED_BYTES, "little")).digest()
    return int.from_bytes(found[:_SEED_BYTES], "little") >> 1

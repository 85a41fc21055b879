"""Random numbers of micro-batches that take turns: each has a stream of its own.

Generators are the process's, not a thread's. If all micro-batches drew from one stream in turn, a checkpoint that runs
one of them again would not find the numbers that it drew the first time, between which the others drew theirs. So each
has its own, derived from the generator's state at the start of the window: the same state gives the same numbers.
"""

import hashlib
from collections.abc import Sequence

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
        self._started: list[list[Tensor]] = []
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

    def end(self, number: int) -> None:
        """Note which generators a micro-batch has drawn from by now."""
        now = self.state()
        self.begin(number)
        for place, (state, start) in enumerate(zip(now, self.state(), strict=True)):
            self._drawn[place] = self._drawn[place] or not torch.equal(state, start)
        self.go_on(now)

    def close(self) -> None:
        """Put the generators back; one that was drawn from goes on by a number, lest the next window draw the same."""
        self.go_on(self._before)
        for generator, drawn in zip(self._generators, self._drawn, strict=True):
            if drawn:
                torch.rand((), generator=generator, device=generator.device)


def _on(devices: frozenset[torch.device]) -> list[torch.Generator]:
    numbers = sorted(torch.device(d).index or 0 for d in devices if d.type == "cuda")
    return [torch.cuda.default_generators[number] for number in numbers]


def _seed(digest: bytes, number: int) -> int:
    found = hashlib.sha256(digest + number.to_bytes(_SEED_BYTES, "little")).digest()
    return int.from_bytes(found[:_SEED_BYTES], "little") >> 1

"""Random numbers: the states of all generators, and a stream of its own for each micro-batch in lock-step."""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Randomness:
    """The states of the default random generators: torch's on the CPU and the devices in use, Python's, numpy's.

    And those of generators of a model's `own`. Where `host` is not wanted, those of torch alone.
    """

    def __init__(
        self, devices: frozenset[torch.device] = frozenset(), own: Sequence[Any] = (), *, host: bool = True
    ) -> None:
        numpy: Any = sys.modules.get("numpy")
        of_host = [random, *([] if numpy is None else [numpy.random])] if host else []
        self._access = list(map(_access, [*_defaults(devices), *of_host, *own]))
        self.states = [read() for read, _ in self._access]

    def restore(self) -> None:
        """Go back to the states."""
        for (_, write), state in zip(self._access, self.states, strict=True):
            write(state)

    def drawn(self, *, torchs: bool = True) -> bool:
        """Whether anyone has drawn a number since; of torch's on the CPU only where it is asked for."""
        same = [_is_same(state, read()) for state, (read, _) in zip(self.states, self._access, strict=True)]
        return not all(same if torchs else same[1:])


class Streams:
    """A random stream for each micro-batch of a window; one is in force at a time.

    Generators are the process's, not a thread's. If all micro-batches drew from one stream in turn, a checkpoint that
    runs one of them again would not find the numbers that it drew the first time. The streams are derived from the
    generators' states at the start of the window: the same state gives the same numbers.
    """

    def __init__(self, devices: frozenset[torch.device], number: int) -> None:
        """Derive them; the generators are left as they are."""
        self.devices = devices
        self._before = self.state()
        self._begun: dict[int, Randomness] = {}  # where each stream begins
        self._left: Randomness | None = None  # where the latest forward to end has left its stream
        self._drawn: set[int] = set()
        self._seeds = [[_seed(state, each) for state in self._before.states] for each in range(number)]

    def begin(self, number: int) -> None:
        """Put a micro-batch's stream in force, from its beginning."""
        for generator, seed in zip(_defaults(self.devices), self._seeds[number], strict=True):
            generator.manual_seed(seed)
        self._begun[number] = self.state()

    def state(self) -> Randomness:
        """Return how far the stream in force has come; its `restore` puts it in force again."""
        return Randomness(self.devices, host=False)

    def end(self, number: int) -> None:
        """Note which generators the forward of a micro-batch has drawn from."""
        self._left = self.state()
        self._note_drawn(self._begun[number], self._left)

    def close(self) -> None:
        """Put the generators back; one that was drawn from goes on by a number, lest the next window draw the same.

        Those who draw may be in backward, as noise on gradients is, or on another thread.
        """
        if self._left is not None:
            self._note_drawn(self._left, self.state())
        self._before.restore()
        for place, generator in enumerate(_defaults(self.devices)):
            if place in self._drawn:
                torch.rand((), generator=generator, device=generator.device)

    def _note_drawn(self, one: Randomness, other: Randomness) -> None:
        pairs = enumerate(zip(one.states, other.states, strict=True))
        self._drawn |= {place for place, pair in pairs if not torch.equal(*pair)}


class Draws:
    """What one run draws, so that another run draws the same."""

    def __init__(self, streams: Streams) -> None:
        self._devices, self._before, self._any = streams.devices, Randomness(streams.devices), False

    def settle(self) -> None:
        """The run is over: note whether it has drawn."""
        self._any = self._before.drawn()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside, and go on afterwards where all generators are now."""
        with ExitStack() as around:
            if self._any:
                around.callback(Randomness(self._devices).restore)
                self._before.restore()
            yield


def is_generator(value: object) -> bool:
    """Tell a generator of random numbers: torch's, Python's or numpy's."""
    of_numpy = type(value).__module__.startswith("numpy.random")
    return isinstance(value, torch.Generator | random.Random) or (
        of_numpy and (hasattr(value, "get_state") or hasattr(value, "bit_generator"))
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are the same: tensors, or numbers and arrays in tuples or dicts."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and hasattr(one[1], "tobytes"):  # numpy's; Python's are numbers alone
        return all(map(_is_same, one, other))
    return one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else bool(one == other)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how the state of a generator is read and written: torch's and numpy's old one, Python's, numpy's."""
    for read, write in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(generator, read):
            return getattr(generator, read), getattr(generator, write)
    bits = generator.bit_generator
    return lambda: bits.state, partial(setattr, bits, "state")


def _defaults(devices: frozenset[torch.device]) -> list[torch.Generator]:
    """Return torch's default generators, the CPU's first."""
    on_cuda = sorted((each for each in devices if each.type == "cuda"), key=str)
    return [torch.default_generator, *(torch.cuda._get_generator(each) for each in on_cuda)]  # noqa: SLF001 - of "cuda", too


def _seed(state: Tensor, number: int) -> int:
    found = hashlib.sha256(state.numpy().tobytes() + number.to_bytes(8, "little")).digest()
    return int.from_bytes(found[:8], "little") >> 1

"""Time contestants beside each other, and alone for their memory; one that fails leaves a reason, not a crash.

Rounds are interleaved and their order is drawn, as in `overhead.py`: a ratio compares two timings of one round, so
whatever else the machine does hits both.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.overhead import collecting_between_rounds, settle
from benchmarks.peak_memory import peak_bytes

LEAST_ROUNDS = 3  # a median of fewer says nothing


@dataclass(frozen=True)
class Contestant:
    """Something that trains: `update(number)` takes one optimizer step on the batch of that number."""

    model: nn.Module
    update: Callable[[int], Tensor | None]  # returns the update's loss where it has one at hand, on the device
    close: Callable[[], None] = lambda: None
    note: Callable[[], str] = lambda: ""


Build = Callable[[], Contestant]


@dataclass
class Outcome:
    """What is known about one contestant; an error ends it, and what was known before it stays."""

    seconds: list[float] = field(default_factory=list)
    peak: int | None = None  # bytes that were allocated at once, alone on the device
    reserved: int | None = None  # what the caching allocator held for it
    loss: float | None = None  # of the first update
    loss_after: float | None = None  # of the first batch, when it has been trained on
    error: str = ""
    note: str = ""

    @property
    def median(self) -> float | None:
        """Seconds per update."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """Half the interquartile range, in seconds."""
        if len(self.seconds) < LEAST_ROUNDS:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2

    def ratio_to(self, other: "Outcome") -> float | None:
        """Return the median over rounds of our time to the other's; without shared rounds, the ratio of medians."""
        if self.median is None or other.median is None:
            return None
        if len(self.seconds) == len(other.seconds):
            return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))
        return self.median / other.median


@contextmanager
def attempt(outcome: Outcome) -> Iterator[None]:
    """Keep the first line of an error in the outcome. Its traceback goes, and with it the tensors that it holds."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (whatever a library raises is its result)
        said = str(error).strip().splitlines()
        outcome.error = f"{type(error).__name__}: {said[0] if said else ''}"
        if isinstance(error, torch.OutOfMemoryError):
            outcome.error = "out of memory"
    if outcome.error:
        release()


def release() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def try_alone(
    build: Build, device: str, outcome: Outcome, *, updates: int = 2, probe: Callable[[nn.Module], Tensor] | None = None
) -> None:
    """Build, train a little and free: its peak memory, its losses, and whether it runs at all.

    The second update is the first to meet the optimizer's state, so its memory is that of all later ones.
    """
    release()

    def train() -> Contestant:
        contestant = build()
        try:
            for number in range(updates):
                loss = contestant.update(number)
                if number == 0 and loss is not None:
                    outcome.loss = float(loss)
        except BaseException:
            contestant.close()
            raise
        return contestant

    with attempt(outcome):
        contestant, outcome.peak = peak_bytes(train, device)
        if device.startswith("cuda"):
            outcome.reserved = torch.cuda.max_memory_reserved()
        if probe is not None:
            with torch.no_grad():
                outcome.loss_after = float(probe(contestant.model))
        outcome.note = contestant.note()
        contestant.close()
        del contestant
    release()


def race(
    builds: dict[str, Build],
    outcomes: dict[str, Outcome],
    device: str,
    *,
    rounds: int,
    warm_up: int = 2,
    seconds: float = 60.0,
    slack: dict[str, float] | None = None,
) -> None:
    """Time one update of each in every round, until the rounds or the seconds are over.

    Whoever has a `slack` and is slower than that many times the best after the warm-up keeps that one timing.
    """
    running: dict[str, Contestant] = {}
    end = time.perf_counter() + seconds
    try:
        for name, build in builds.items():
            if not outcomes[name].error:
                with attempt(outcomes[name]):
                    running[name] = build()
        order = random.Random(0)  # noqa: S311  (who follows whom matters to the caches)
        with collecting_between_rounds() as collect:
            for number in range(warm_up + rounds):
                if number >= warm_up + LEAST_ROUNDS and time.perf_counter() > end:
                    break
                if number == warm_up and slack is not None:
                    _drop_slow(running, outcomes, slack)
                collect()
                for name in order.sample(list(running), len(running)):
                    outcome = outcomes[name]
                    with attempt(outcome):
                        took = _timed(running[name], number, device)
                        # The last round of the warm-up stays until there is a better one, for `slack`.
                        outcome.seconds = [*outcome.seconds, took] if number > warm_up else [took]
                    if outcome.error:
                        outcome.seconds = []
                        running.pop(name).close()
                        release()
        for name, contestant in running.items():
            outcomes[name].note = contestant.note()
    finally:
        for contestant in running.values():
            contestant.close()
        running.clear()
        release()


def _drop_slow(running: dict[str, Contestant], outcomes: dict[str, Outcome], slack: dict[str, float]) -> None:
    best = min((took for name in running for took in outcomes[name].seconds), default=0.0)
    for name in [name for name in running if outcomes[name].seconds[0] > slack.get(name, math.inf) * best]:
        contestant = running.pop(name)
        outcomes[name].note = f"{contestant.note()} (timed once: slow)".strip()
        contestant.close()


def _timed(contestant: Contestant, number: int, device: str) -> float:
    settle(device)
    start = time.perf_counter()
    contestant.update(number)
    settle(device)
    return time.perf_counter() - start


@contextmanager
def capped(budget: int | None, device: str) -> Iterator[None]:
    """Let the process have this many bytes of the device, as if it were a smaller one."""
    if budget is None or not device.startswith("cuda"):
        yield
        return
    release()
    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

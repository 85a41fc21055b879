"""Race contestants of one work: each is built once, warmed for its peak while the others idle, then timed in rounds.

A lock-step window has a thread for every micro-batch, and each plans its convolutions anew: building a contestant for
its memory and once more for its time would take longer than the race.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from textwrap import shorten

import torch

from benchmarks.gpu_figures import GIB, UNKNOWN, Bar, Figure, figure
from benchmarks.peak_memory import peak_bytes
from benchmarks.racing import Build, Contestant, Outcome, attempt, race, release
from benchmarks.report import Grid

SLOW = 25.0  # whoever takes that many times the fastest is timed once
TIME_IS_OVER = "not run: the time was over"


@dataclass(frozen=True)
class Entry:
    """One contestant, whom it is compared with, and what is asked of it."""

    build: Build
    beside: str
    bar: Bar | None = None
    error: Callable[[], float] | None = None  # of its gradient on a small batch, against float64
    peak_beside: str = ""  # whose peak its own is compared with, where that is another


@dataclass(frozen=True)
class Raced(Figure):
    """A figure, with the host's memory and the gradient's error."""

    host_bytes: int | None = None
    gradient_error: float | None = None


@dataclass
class Seen(Outcome):
    """What is known of a contestant so far."""

    host: int | None = None  # bytes of pinned host memory in use at once
    gradient_error: float | None = None
    judging: str = ""  # why there is none


def raced(
    work: str,
    title: str,
    entries: dict[str, Entry],
    device: str,
    *,
    rounds: int,
    end: float,
    header: tuple[str, str] = ("× plain", "/ plain's"),
) -> Iterator[tuple[Grid, list[Raced]]]:
    """Yield the work's table before it is timed, and again with times; `end` is when to be done, as far as one can."""
    seen = {name: Seen() for name in entries}
    start = time.perf_counter()
    ready_by = start + 0.7 * (end - start)
    outcomes: dict[str, Outcome] = {**seen}
    running: dict[str, Contestant] = {}
    try:
        for name, entry in entries.items():
            if time.perf_counter() > ready_by:
                seen[name].error = TIME_IS_OVER
                continue
            _judge(entry, seen[name])
            _warm(name, entry.build, device, seen[name], running)
            say(f"{work}: {name} is ready after {time.perf_counter() - start:.1f} s {seen[name].error}")
        yield _table(work, title, entries, seen, header)
        race(
            {name: _already(contestant) for name, contestant in running.items()},
            outcomes,
            device,
            rounds=rounds,
            warm_up=2,  # a BigStep's fourth update looks whether samples are coupled
            seconds=end - time.perf_counter(),
            slack=dict.fromkeys(entries, SLOW),
        )
        running.clear()  # the race has closed them
        yield _table(work, title, entries, seen, header)
    finally:
        for contestant in running.values():
            contestant.close()
        running.clear()
        release()
        _release_host()


def say(text: str) -> None:
    """Tell whoever watches, and whoever reads what was left of a run."""
    print(text.strip(), file=sys.stderr, flush=True)


def _already(contestant: Contestant) -> Build:
    return lambda: contestant


def _judge(entry: Entry, outcome: Seen) -> None:
    """See how far its gradient is off; where that fails, it may still be timed."""
    if entry.error is not None:
        judged = Outcome()
        with attempt(judged):
            outcome.gradient_error = entry.error()
        outcome.judging = judged.error


def _warm(name: str, build: Build, device: str, outcome: Seen, running: dict[str, Contestant]) -> None:
    """Build, train on twice and stay: the second update is the first to meet the optimizer's state."""
    release()
    _forget_workspaces()

    def train() -> Contestant:
        contestant = build()
        try:
            for number in range(2):
                loss = contestant.update(number)
                if number == 0 and loss is not None:
                    outcome.loss = float(loss)
        except BaseException:
            contestant.close()
            raise
        return contestant

    with attempt(outcome):
        others = _pinned("current")
        contestant, outcome.peak = peak_bytes(train, device)
        if device.startswith("cuda"):
            outcome.reserved = torch.cuda.max_memory_reserved()
            pinned = _pinned("peak")
            outcome.host = None if pinned is None or others is None else pinned - others
        outcome.note = contestant.note()
        running[name] = contestant


def _forget_workspaces() -> None:
    """Have every contestant allocate the workspaces of its own threads: some have one thread, some sixteen."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - no public name
    if clear is not None and torch.cuda.is_available():
        clear()


def _pinned(which: str) -> int | None:
    """Return how much pinned memory is in use, or was at most since it was asked for the current use."""
    with suppress(AttributeError, RuntimeError):
        if which == "current":
            torch.cuda.memory.reset_peak_host_memory_stats()
        found = torch.cuda.memory.host_memory_stats()
        for name in (f"active_bytes.{which}", f"allocated_bytes.{which}"):
            if name in found:
                return int(found[name])
    return None  # this torch does not say


def _release_host() -> None:
    """Give pinned memory back: the next work has blocks of other sizes."""
    empty = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - no public name
    if empty is not None and torch.cuda.is_available():
        with suppress(RuntimeError):
            empty()


def _table(
    work: str, title: str, entries: dict[str, Entry], seen: dict[str, Seen], header: tuple[str, str]
) -> tuple[Grid, list[Raced]]:
    figures = []
    for name, entry in entries.items():
        outcome = seen[name]
        ratio = outcome.ratio_to(seen[entry.beside])
        plain = figure(work, name, outcome, ratio, hand=seen[entry.peak_beside or entry.beside], bar=entry.bar)
        said = {**vars(plain), "note": "; ".join(part for part in (outcome.note, outcome.judging) if part)}
        figures.append(Raced(**said, host_bytes=outcome.host, gradient_error=outcome.gradient_error))
    return _grid(title, figures, header), figures


def _grid(title: str, figures: list[Raced], beside: tuple[str, str]) -> Grid:
    time_beside, peak_beside = beside
    header = ("", "ms", time_beside, "GiB", peak_beside, "host GiB", "first loss", "error of g", "bar", "met", "note")
    rows = [_row(each) for each in figures]
    kept = [place for place in range(len(header)) if any(row[place] not in {"", UNKNOWN} for row in rows)]
    return Grid(title, tuple(header[i] for i in kept), [tuple(row[i] for i in kept) for row in rows])


def _row(each: Raced) -> tuple[str, ...]:
    spread = "" if each.spread is None else f" ± {each.spread:,.1f}"
    return (
        each.contestant,
        UNKNOWN if each.milliseconds is None else f"{each.milliseconds:,.1f}{spread}",
        UNKNOWN if each.compared is None else f"{each.compared:.3f}",
        _gib(each.peak_bytes),
        UNKNOWN if each.peak_ratio is None else f"{each.peak_ratio:.3f}",
        _gib(each.host_bytes or None),
        UNKNOWN if each.loss is None else f"{each.loss:.5f}",
        UNKNOWN if each.gradient_error is None else f"{each.gradient_error:.1e}",
        each.bar,
        each.met,
        "; ".join(shorten(part, 60, placeholder=" …") for part in (each.error, each.note) if part),
    )


def _gib(number: int | None) -> str:
    if number is None:
        return UNKNOWN
    return f"{number / GIB:.2f}" if number > GIB / 10 else f"{number / GIB:.5f}"

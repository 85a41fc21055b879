"""What accumulation costs beside a tuned hand loop: time per update and peak memory, as ratios.

    python -m benchmarks.overhead [--device cuda] [--only linear] [--rounds N] [--json] [--out FOLDER]

One process times the contestants in turn, round after round. A ratio compares two timings of the same round, a few
milliseconds apart, so that what else the machine does hits both; the median over rounds is what is reported.
"""

import argparse
import ctypes
import gc
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector

from benchmarks.loops import HAND, Loop, Runner, all_loops
from benchmarks.machine import this_machine
from benchmarks.peak_memory import peak_bytes
from benchmarks.report import RESULTS, Grid, Report, progress
from benchmarks.workloads import Batch, Workload, workloads

CLIPS = (None, 1.0)
REGION = 0.010  # seconds that a timed region takes the hand loop at least, to outlast the clock and what caches forget
WARM_UP = 3  # rounds: caches, thread pools, the first reading of a loss
SCALARS = {"cpu": 8 * 8, "cuda": 32 * 512}  # bytes of some scalars for counts and losses; CUDA hands out 512 at least


@dataclass(frozen=True)
class Overhead:
    """One contestant on one workload."""

    workload: str
    clip_norm: float | None
    contestant: str
    ratio: float  # the median over rounds of its time to the hand loop's
    ratio_low: float  # the quartiles
    ratio_high: float
    microseconds: float  # per update, the median; this machine's
    peak_bytes: int
    peak_extra: int  # over the hand loop's
    bar: float
    peak_bar: int

    @property
    def met(self) -> bool:
        """Whether time and memory stay below the bar."""
        return self.ratio <= self.bar and self.peak_extra <= self.peak_bar

    @property
    def cell(self) -> str:
        """The time as it is read: the median, and half of what lies between the quartiles."""
        return f"{self.ratio:.3f} ± {(self.ratio_high - self.ratio_low) / 2:.3f}"


def measure(work: Workload, clip: float | None, rounds: int, loops: dict[str, Loop]) -> Iterator[Overhead | None]:
    """Yield None after each round, and at the end the contestants' figures."""
    peaks = measure_memory(work, clip, loops)
    updates = enough_updates(work, loops[HAND](work, clip))
    batches = work.micro_batches(updates)
    runners = {name: loop(work, clip) for name, loop in loops.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)  # noqa: S311  (drawn for every round: who follows whom matters to the caches)
    with collecting_between_rounds() as collect:
        for number in range(WARM_UP + rounds):
            collect()
            for name in order.sample(list(runners), len(runners)):
                took = timed(runners[name], batches, work.device)
                if number >= WARM_UP:
                    seconds[name].append(took)
            if number >= WARM_UP:
                yield None
    for name, times in seconds.items():
        ratios = [mine / hand for mine, hand in zip(times, seconds[HAND], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        yield Overhead(
            workload=work.name,
            clip_norm=clip,
            contestant=name,
            ratio=middle,
            ratio_low=low,
            ratio_high=high,
            microseconds=statistics.median(times) / updates * 1e6,
            peak_bytes=peaks[name],
            peak_extra=peaks[name] - peaks[HAND],
            bar=work.bar,
            peak_bar=SCALARS[work.device.split(":")[0]],
        )


def enough_updates(work: Workload, hand: Runner) -> int:
    """Return how many updates of each contestant are timed at once: as many as take the hand loop a `REGION`."""
    batches = work.micro_batches(work.updates)
    seconds = min(timed(hand, batches, work.device) for _ in range(WARM_UP + 2)) / work.updates
    return max(work.updates, math.ceil(REGION / seconds))


def timed(runner: Runner, batches: list[Batch], device: str) -> float:
    """Return the seconds of one pass over the batches, the device drained on both sides."""
    settle(device)
    start = time.perf_counter()
    runner.run(batches)
    settle(device)
    return time.perf_counter() - start


def settle(device: str) -> None:
    """Wait for what was launched."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def collecting_between_rounds() -> Iterator[Callable[[], object]]:
    """Keep the garbage collector out of what is timed, and yield what to call between rounds.

    The frameworks' own objects, half a million, are set aside first: going through them takes longer than a round.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


def measure_memory(work: Workload, clip: float | None, loops: dict[str, Loop]) -> dict[str, int]:
    """Peak of building a model and three updates of it; and a proof that all contestants train the same."""
    batches = work.micro_batches(3)
    peaks: dict[str, int] = {}
    truth = None
    # The first pass on a GPU allocates the libraries' workspaces, which are nobody's.
    hand = loops[HAND](work, clip)
    hand.run(batches)
    del hand
    for name, loop in loops.items():
        gc.collect()

        def train(loop: Loop = loop) -> Runner:
            runner = loop(work, clip)
            runner.run(batches)
            return runner

        runner, peaks[name] = peak_bytes(train, work.device)
        weights = parameters_to_vector(runner.model.parameters()).detach().double()
        truth = weights if truth is None else truth
        if not (weights - truth).norm() <= (1e-2 if work.autocast else 1e-4) * truth.norm():
            message = f"{name} did not train {work.name} as the hand loop did, so its time means nothing"
            raise RuntimeError(message)
        del runner
    return peaks


def grids(rows: list[Overhead]) -> list[Grid]:
    """Ratios first; what belongs to this machine after."""
    names = tuple(dict.fromkeys(row.contestant for row in rows))
    keys = dict.fromkeys((row.workload, row.clip_norm) for row in rows)
    place = {(row.workload, row.clip_norm, row.contestant): row for row in rows}
    ratios, memory, absolute = [], [], []
    for workload, clip in keys:
        title = workload + (f", clip {clip:g}" if clip else "")
        found = [place[workload, clip, name] for name in names]
        ratios.append((title, *(row.cell for row in found[1:]), f"≤ {found[-1].bar:.2f}", verdict(found[-1])))
        memory.append((title, *(f"{row.peak_bytes:,} ({row.peak_extra:+,})" for row in found)))
        absolute.append((title, *(f"{row.microseconds:,.0f}" for row in found)))
    return [
        Grid(
            "Time per update, as a ratio to the tuned hand loop: median of rounds ± half the interquartile range",
            ("", *names[1:], "bigbatch's bar", "met"),
            ratios,
        ),
        Grid("Peak memory in bytes (over the hand loop)", ("", *names), memory),
        Grid("Microseconds per update, on this machine only", ("", *names), absolute),
    ]


def verdict(row: Overhead) -> str:
    """Say plainly whether bigbatch is below its bar."""
    if row.met:
        return "yes"
    return "no (time)" if row.ratio > row.bar else "no (memory)"


def main() -> int:
    """Measure, show, keep. A slow run is a figure, not a failure: the machine may be busy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name contains this")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds for each, instead of each one's own number")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="fresh processes, whose median is taken")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for overhead-DEVICE.json and .md")
    arguments = parser.parse_args()
    # One thread: the second core is for whatever else runs, so that it does not wait in our kernels.
    torch.set_num_threads(1)
    steady = keep_memory()
    if arguments.runs > 1:
        rows = over_runs(arguments)
    else:
        rows = measure_all(arguments.device, arguments.only, arguments.rounds)
    several = f"Each figure is the median of {arguments.runs} processes, ± half of what lies between the extremes. "
    notes = [
        (several if arguments.runs > 1 else "")
        + "`hand loop again` is the hand loop a second time: how far it is from 1 is the noise of the method.",
        "Float32 parameters, one CPU thread; AdamW is fused, SGD is torch's default. Micro-batches lie ready.",
        "The C library keeps freed memory, for all alike: else it returns and asks for pages when it likes, 390 to 810 "
        "page faults per update of the same MLP loop."
        if steady
        else "The C library returns memory when it likes.",
        f"A timed region is as many updates as take the hand loop {REGION * 1e3:.0f} ms, at least.",
        "Memory is what the allocator had handed out at most, from building the model to the end of the third update.",
    ]
    name = f"overhead-{arguments.device.split(':')[0]}"
    report = Report(name, this_machine(arguments.device), grids(rows), notes, list(rows))
    report.write(arguments.out)
    report.show(as_json=arguments.json)
    return 0


def over_runs(arguments: argparse.Namespace) -> list[Overhead]:
    """Measure in several processes: where memory comes to lie is chance, and moves all rounds of one by a hundredth."""
    found: dict[tuple[str, float | None, str], list[Overhead]] = {}
    with progress() as bar, tempfile.TemporaryDirectory() as folder:
        task = bar.add_task("processes", total=arguments.runs)
        for _ in range(arguments.runs):
            command = [
                sys.executable,
                "-m",
                "benchmarks.overhead",
                "--device",
                arguments.device,
                "--out",
                folder,
                "--json",
            ]
            command += ["--only", arguments.only] + (["--rounds", str(arguments.rounds)] if arguments.rounds else [])
            done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ourselves
            for row in json.loads(done.stdout)["measured"]:
                one = Overhead(**row)
                found.setdefault((one.workload, one.clip_norm, one.contestant), []).append(one)
            bar.advance(task)
    return [_middle(rows) for rows in found.values()]


def _middle(rows: list[Overhead]) -> Overhead:
    """Return the median of several runs; its range takes the place of the quartiles."""
    ratios = [row.ratio for row in rows]
    return replace(
        rows[0],
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        microseconds=statistics.median(row.microseconds for row in rows),
        peak_bytes=max(row.peak_bytes for row in rows),
        peak_extra=max(row.peak_extra for row in rows),
    )


def keep_memory() -> bool:
    """Have glibc keep freed memory: when it returns some is chance, and costs more than what is timed."""
    trim_threshold, mmap_threshold, never = -1, -3, 1 << 30
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(trim_threshold, never) and mallopt(mmap_threshold, never))


def measure_all(device: str, only: str, rounds: int | None) -> list[Overhead]:
    """Every workload, with and without clipping, under one bar."""
    chosen = [(work, clip) for work in workloads(device) if only.lower() in work.name.lower() for clip in CLIPS]
    rows: list[Overhead] = []
    with progress() as bar:
        task = bar.add_task("overhead", total=sum(rounds or work.rounds for work, _ in chosen))
        for work, clip in chosen:
            bar.update(task, description=work.name + (f", clip {clip:g}" if clip else ""))
            for row in measure(work, clip, rounds or work.rounds, all_loops()):
                if row is None:
                    bar.advance(task)
                else:
                    rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())

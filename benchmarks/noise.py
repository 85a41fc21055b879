"""What it costs to measure gradient noise while training, and how often its interval holds the truth.

    python -m benchmarks.noise [--device cuda] [--only linear] [--rounds N] [--runs N] [--json] [--out FOLDER]

As in `overhead.py`, one process times the contestants in turn, round after round, and a ratio compares two timings of
one round. `again` is the same training without a GradientNoise once more: its distance from 1 is what the method cannot
resolve. A timed region is as many updates as bring the default exactly one look, or a few.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.loops import Runner
from benchmarks.machine import this_machine
from benchmarks.noise_truth import Regression, holds, measured
from benchmarks.overhead import WARM_UP, collecting_between_rounds, keep_memory, timed
from benchmarks.report import RESULTS, Grid, Report, progress
from benchmarks.workloads import Batch, Workload, workloads
from bigbatch import Accumulator, BigStep, GradientNoise, Options

BAR = 1.02
DEFAULT = 16  # GradientNoise's own `every`
PLAIN, AGAIN, NOISE, ALWAYS = "without", "without, again", "GradientNoise", "every=1"
LOOKS: dict[str, int | None] = {PLAIN: None, AGAIN: None, NOISE: DEFAULT, ALWAYS: 1}
LEAST_ROUNDS = 6
SIZES = {"even": (16,) * 8, "uneven": (12, 36, 4, 20, 8, 28, 15, 5)}
TRIALS, WINDOWS = 200, 48


@dataclass(frozen=True)
class Cost:
    """One way to train, looked at or not."""

    workload: str
    entrance: str
    contestant: str
    ratio: float  # the median over rounds of its time to that without
    ratio_low: float  # the quartiles, or the extremes over processes
    ratio_high: float
    microseconds: float  # per update, the median; this machine's


@dataclass(frozen=True)
class Coverage:
    """How often the truth lay in the interval."""

    problem: str
    noise_scale: float
    batch: int
    trials: int
    held: int
    unbounded: int  # intervals without an upper end
    scale: float  # the median of what was found
    width: float  # the median of high / low, where there is an upper end


def by_accumulator(work: Workload, every: int | None) -> Runner:
    """Train with an Accumulator."""
    model = work.fresh_model()
    accumulator = Accumulator(model, work.optimizer(model), steps=work.steps)
    _look(accumulator, every)

    def run(batches: list[Batch]) -> None:
        for batch in accumulator.over(batches):
            accumulator.backward(work.loss(model, batch))

    return Runner(model, run)


def by_big_step(work: Workload, every: int | None, *, cuda_graph: bool = False) -> Runner:
    """Train with a BigStep, on batches of the same samples."""
    model = work.fresh_model()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        with torch.autocast(work.device.split(":")[0], dtype=torch.bfloat16, enabled=work.autocast):
            return F.cross_entropy(model(inputs).view(-1, work.classes), labels.reshape(-1))

    options = Options(cuda_graph=cuda_graph, check=False)
    step = BigStep(model, work.optimizer(model), loss_fn, micro_batch_size=work.micro_batch, options=options)
    _look(step, every)
    joined: dict[int, list[Batch]] = {}

    def run(batches: list[Batch]) -> None:
        if id(batches) not in joined:  # in the warm-up: making batches is nobody's
            joined[id(batches)] = _joined(batches, work.steps)
        for batch in joined[id(batches)]:
            step(batch)

    return Runner(model, run)


def _look(training: Accumulator | BigStep, every: int | None) -> None:
    if every is not None:
        GradientNoise(training, every=every)


def _joined(batches: list[Batch], steps: int) -> list[Batch]:
    """Make big batches of micro-batches, with the labels of a sample beside it."""
    found = []
    for at in range(0, len(batches), steps):
        inputs, labels = zip(*batches[at : at + steps], strict=True)
        whole = torch.cat(inputs)
        found.append((whole, torch.cat(labels).view(len(whole), -1)))
    return found


def entrances(device: str) -> dict[str, Callable[[Workload, int | None], Runner]]:
    """Return every way in that there is on this device."""
    found: dict[str, Callable[[Workload, int | None], Runner]] = {
        "Accumulator": by_accumulator,
        "BigStep": by_big_step,
    }
    if device.startswith("cuda"):
        found["BigStep, cuda_graph"] = lambda work, every: by_big_step(work, every, cuda_graph=True)
    return found


def measure(
    work: Workload, entrance: str, build: Callable[[Workload, int | None], Runner], rounds: int
) -> Iterator[Cost | None]:
    """Yield None after each round, and at the end the contestants' figures."""
    batches = work.micro_batches(work.updates)
    runners = {name: build(work, every) for name, every in LOOKS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
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
        ratios = [mine / plain for mine, plain in zip(times, seconds[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        yield Cost(work.name, entrance, name, middle, low, high, statistics.median(times) / work.updates * 1e6)


def measure_all(device: str, only: str, rounds: int | None) -> list[Cost]:
    """Every workload, by every entrance."""
    chosen = [
        (_long_enough(work), entrance, build)
        for work in workloads(device)
        if only.lower() in work.name.lower()
        for entrance, build in entrances(device).items()
    ]
    rows: list[Cost] = []
    with progress() as bar:
        task = bar.add_task("noise", total=sum(rounds or work.rounds for work, *_ in chosen))
        for work, entrance, build in chosen:
            bar.update(task, description=f"{work.name}, {entrance}")
            for row in measure(work, entrance, build, rounds or work.rounds):
                if row is None:
                    bar.advance(task)
                else:
                    rows.append(row)
    return rows


def _long_enough(work: Workload) -> Workload:
    """Have as many updates in a timed region as bring the default a look or a few; fewer rounds make up for it."""
    updates = DEFAULT * -(-work.updates // DEFAULT)
    return replace(work, updates=updates, rounds=max(LEAST_ROUNDS, work.rounds * work.updates // updates))


def over_runs(arguments: argparse.Namespace) -> list[Cost]:
    """Measure in several processes: where memory comes to lie is chance, and moves all rounds of one."""
    found: dict[tuple[str, str, str], list[Cost]] = {}
    with progress() as bar, tempfile.TemporaryDirectory() as folder:
        task = bar.add_task("processes", total=arguments.runs)
        for _ in range(arguments.runs):
            command = [sys.executable, "-m", "benchmarks.noise", "--device", arguments.device, "--trials", "0"]
            command += ["--out", folder, "--json", "--only", arguments.only]
            command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ourselves
            for row in json.loads(done.stdout)["measured"]:
                one = Cost(**row)
                found.setdefault((one.workload, one.entrance, one.contestant), []).append(one)
            bar.advance(task)
    return [_middle(rows) for rows in found.values()]


def _middle(rows: list[Cost]) -> Cost:
    """Return the median of several runs; its range takes the place of the quartiles."""
    ratios = [row.ratio for row in rows]
    return replace(
        rows[0],
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        microseconds=statistics.median(row.microseconds for row in rows),
    )


def coverage(trials: int) -> list[Coverage]:
    """Measure problems whose answer is known, again and again."""
    found = []
    for name, sizes in SIZES.items():
        for spread in (0.5, 2.0, 8.0):
            problem = Regression(spread=spread)
            reports = [measured(problem, sizes, WINDOWS, seed) for seed in range(trials)]
            bounded = [report.interval for report in reports if report.interval[1] != float("inf")]
            found.append(
                Coverage(
                    problem=f"{name} micro-batches",
                    noise_scale=problem.noise_scale,
                    batch=sum(sizes),
                    trials=trials,
                    held=sum(holds(report, problem.noise_scale) for report in reports),
                    unbounded=trials - len(bounded),
                    scale=statistics.median(report.scale or float("inf") for report in reports),
                    width=statistics.median(high / low for low, high in bounded if low) if bounded else float("inf"),
                )
            )
    return found


def grids(rows: list[Cost], covered: list[Coverage]) -> list[Grid]:
    """What it costs, and how often it is right."""
    place = {(row.workload, row.entrance, row.contestant): row for row in rows}
    costs, absolute = [], []
    for workload, entrance in dict.fromkeys((row.workload, row.entrance) for row in rows):
        again, default, always = (place[workload, entrance, name] for name in (AGAIN, NOISE, ALWAYS))
        met = "yes" if default.ratio < BAR else "no"
        costs.append((f"{workload}, {entrance}", *map(_cell, (again, default, always)), met))
        absolute.append(
            (f"{workload}, {entrance}", *(f"{place[workload, entrance, n].microseconds:,.0f}" for n in LOOKS))
        )
    tables = [
        Grid(
            "Time per update, as a ratio to the same training without GradientNoise",
            ("", AGAIN, f"{NOISE} (every={DEFAULT})", ALWAYS, f"default below {BAR}"),
            costs,
        ),
        Grid("Microseconds per update, on this machine only", ("", *LOOKS), absolute),
    ]
    if covered:
        head = ("", "batch", "true scale", "median found", "median high/low", "in its 95 % interval", "no upper end")
        lines: list[tuple[str, ...]] = [
            (
                row.problem,
                f"{row.batch}",
                f"{row.noise_scale:,.0f}",
                f"{row.scale:,.3g}",
                f"{row.width:.2g}",
                f"{row.held} of {row.trials}",
                f"{row.unbounded}",
            )
            for row in covered
        ]
        tables.append(Grid(f"Linear regression, known in closed form, {WINDOWS} windows each", head, lines))
    return tables


def _cell(row: Cost) -> str:
    return f"{row.ratio:.3f} ± {(row.ratio_high - row.ratio_low) / 2:.3f}"


def main() -> int:
    """Measure, show, keep. A slow run is a figure, not a failure: the machine may be busy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name contains this")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds for each, instead of each one's own number")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="fresh processes, whose median is taken")
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N", help="runs of each problem that is known")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for noise.json and .md, noise-cuda on a GPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the second core is for whatever else runs, so that it does not wait in our kernels
    keep_memory()
    if arguments.runs > 1:
        rows = over_runs(arguments)
        how = f"Each ratio is the median of {arguments.runs} processes, ± half of what lies between the extremes."
    else:
        rows = measure_all(arguments.device, arguments.only, arguments.rounds)
        how = "Each ratio is the median of rounds, ± half the interquartile range."
    covered = coverage(arguments.trials) if arguments.trials else []
    even, uneven = (", ".join(map(str, sizes)) for sizes in SIZES.values())
    notes = [
        f"{how} `{AGAIN}` is the same training once more: how far it is from 1 is the noise of the method.",
        "Float32 parameters, one CPU thread, four micro-batches an update; AdamW is fused, SGD is torch's default.",
        f"Regression: 20 features, weights that never move, micro-batches of {even} or of {uneven} samples.",
    ]
    name = "noise-cuda" if arguments.device.startswith("cuda") else "noise"
    found: list[object] = [*rows, *covered]
    report = Report(name, this_machine(arguments.device), grids(rows, covered), notes, found)
    report.write(arguments.out)
    report.show(as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

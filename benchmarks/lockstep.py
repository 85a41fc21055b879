"""Micro-batches in lock-step on one GPU: what exactness costs where samples are coupled, and how exact it is.

    python -m benchmarks.lockstep [--only resnet contrastive exact] [--rounds N] [--limit S] [--out FOLDER]
    python -m benchmarks.lockstep --device cpu --tiny  # does everything run? the times mean nothing

The parts: resnet (BatchNorm, beside plain accumulation, which is wrong there), contrastive (beside GradCache), exact
(in float64, against one big batch). Tables are printed and files written as they come, so a run that is cut off keeps
what it has; one that hangs is ended, and says where each thread was.
"""

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import lockstep_contrastive, lockstep_exact, lockstep_resnet
from benchmarks.lockstep_exact import Exact
from benchmarks.lockstep_libraries import versions
from benchmarks.lockstep_racing import Raced, say
from benchmarks.lockstep_scale import scale
from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Grid, Report, show
from benchmarks.silence import silence

LIMIT = 125.0  # seconds for everything but imports
GRACE = 15.0  # seconds after the limit: by then every part has seen that its time is over
LIBRARIES = ("transformers", "timm", "torchvision")

Tables = Iterator[tuple[Grid, list[Raced] | list[Exact]]]


@dataclass(frozen=True)
class Part:
    """One table; `seconds` is what it should take at most, and `run` is told when that is over."""

    name: str  # on the command line
    seconds: float
    run: Callable[[float], Tables]


def parts(arguments: argparse.Namespace) -> list[Part]:
    """Everything that can be measured. The ResNet-50 comes last: it takes longest, and has what is left."""
    sizes, rounds = scale(arguments.device, tiny=arguments.tiny), arguments.rounds

    def small(end: float) -> Tables:
        yield from lockstep_resnet.measure(lockstep_resnet.small_network(sizes), rounds=rounds, end=end)

    def contrastive(end: float) -> Tables:
        yield from lockstep_contrastive.measure(sizes, rounds=rounds, end=end)

    def wide(end: float) -> Tables:
        yield from lockstep_contrastive.measure_wide(sizes, rounds=rounds, end=end)

    def exact(end: float) -> Tables:
        yield from lockstep_exact.measure(sizes, end=end)

    def large(end: float) -> Tables:
        yield from lockstep_resnet.measure(lockstep_resnet.large_network(sizes), rounds=rounds, end=end)

    return [
        Part("resnet", 52.0, small),
        Part("contrastive", 24.0, contrastive),
        Part("contrastive", 20.0, wide),
        Part("exact", 28.0, exact),
        Part("resnet", 60.0, large),
    ]


def main() -> int:
    """Measure, show, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine can run; writes no files by itself")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these parts")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds, at most (5)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help=f"seconds for everything ({LIMIT:g})")
    parser.add_argument("--out", type=Path, help="folder for lockstep.json and lockstep.md; lockstep-NAME with --only")
    arguments = parser.parse_args()
    known = parts(arguments)
    names = list(dict.fromkeys(part.name for part in known))
    if unknown := [name for name in arguments.only if name not in names]:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(names)}")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    # Float32 means float32: rounding is part of what is reported.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    faulthandler.dump_traceback_later(arguments.limit + GRACE, exit=True)
    try:
        with silence(*LIBRARIES):
            return measure([part for part in known if part.name in (arguments.only or names)], arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(chosen: list[Part], arguments: argparse.Namespace) -> int:
    """Run the parts, and write what there is after each table."""
    begun = time.perf_counter()
    out = arguments.out or (None if arguments.tiny else RESULTS)
    name = "-".join(("lockstep", *arguments.only))
    machine, said = this_machine(arguments.device), notes()
    tables: dict[str, tuple[Grid, list[Raced] | list[Exact]]] = {}
    failed = False

    def report() -> Report:
        measured = [row for _, rows in tables.values() for row in rows]
        return Report(name, machine, [bars(measured), *(grid for grid, _ in tables.values())], said, list(measured))

    for part in chosen:
        start = time.perf_counter()
        end = min(start + part.seconds * max(1.0, arguments.limit / LIMIT), begun + arguments.limit)
        titles: list[str] = []
        if start >= end:
            said.append(f"{part.name} was not run: the {arguments.limit:g} s were over.")
            continue
        try:
            for grid, rows in part.run(end):
                titles.append(grid.title)
                tables[grid.title] = grid, rows
                if out is not None:
                    report().write(out)
        except Exception as error:  # noqa: BLE001 - the other parts still have something to say
            said.append(f"{part.name} failed: {type(error).__name__}: {error}")
            failed = True
        said.append(f"{part.name} took {time.perf_counter() - start:.0f} s.")
        say(said[-1])
        for title in dict.fromkeys(titles):
            show(tables[title][0])
    last = report()
    show(last.grids[0])
    if out is not None:
        last.write(out)
    for note in (*said, machine.sentence()):
        print(note)
    inexact = any(isinstance(row, Exact) and row.met == "no" for row in last.measured)
    return 1 if failed or inexact else 0


def bars(measured: list[Raced | Exact]) -> Grid:
    """All of our bars in one table."""
    rows: list[tuple[str, ...]] = []
    for row in measured:
        if isinstance(row, Exact):
            known = [each for each in (row.gradient, row.outputs, row.statistics) if each is not None]
            worst = f"{max(known):.1e}" if known else "–"
            what = ", ".join(part for part in (row.name, row.library, row.activations) if part)
            rows.append(("exact", what, worst, f"≤ {lockstep_exact.BAR:.0e}", "", row.met))
        elif row.bar:
            ratio = "–" if row.compared is None else f"{row.compared:.3f}"
            peak = "–" if row.peak_ratio is None else f"{row.peak_ratio:.3f}"
            rows.append((row.work, row.contestant, ratio, row.bar, peak, row.met))
    return Grid("bigbatch's bars", ("", "", "measured", "must (stretch)", "peak / plain's", "met"), rows)


def notes() -> list[str]:
    """Say what has to be known to read the tables."""
    said = f"""
ms: time per update, the median of interleaved rounds of one update each, in drawn order, ± half the interquartile
range; the device is drained around each. "× plain" is the median over rounds of the ratio to plain accumulation
with the same micro-batches, a tuned hand loop. It is wrong here: it has other statistics, or another loss.

GiB: the peak, what the allocator had handed out at most over two updates, from building the model on, others idle;
workspaces of matrix products, one per thread, are counted. Host GiB: pinned memory in use at once.

Float32 without TF32, cuDNN without its benchmark, clipping at 1.0; SGD with momentum (ResNets) and AdamW (towers),
fused; batches lie on the device.

Error of g: |g − g*| / |g*| over all parameters on a small batch, cut into four, g* being one big batch in float64
from the same weights. One full batch's is what rounding alone does.

Graph: with Options(cuda_graph=True), which captures a window as one CUDA graph, forward and backward of all
micro-batches with their meetings. "The same (wrong)" is the plain loop's arithmetic, replayed by BigStep with
batch_norm="micro".

Bars of memory: offload within 1.35 of plain accumulation's peak; recompute within 1.1 of the wrong loop's.

Libraries of models: {versions()}.
"""
    return [" ".join(paragraph.split()) for paragraph in said.strip().split("\n\n")]


if __name__ == "__main__":
    sys.exit(main())

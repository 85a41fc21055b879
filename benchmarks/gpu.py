"""BigStep beside its peers on one GPU: time per update, peak memory, and which of its bars it meets.

    python -m benchmarks.gpu [--only 4x8 packing ...] [--rounds N] [--all] [--compile] [--out FOLDER]
    python -m benchmarks.gpu --profile 4x8        # where the time of our update goes, instead of the tables
    python -m benchmarks.gpu --device cpu --tiny  # does everything run? the figures mean nothing

The parts: 1x32, 4x8, 8x8 (micro-batch x steps), packing, sizing, llama. Tables are printed and files written after each
part, so a run that is cut off keeps what it has.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import gpu_llama, gpu_packing, gpu_sizing, gpu_windows
from benchmarks.gpu_figures import Figure, grid
from benchmarks.gpu_profile import profiled
from benchmarks.gpu_scale import Scale, in_bytes, scale
from benchmarks.machine import this_machine
from benchmarks.racing import Build, capped
from benchmarks.report import RESULTS, Grid, Report, show
from benchmarks.silence import silence

LIMIT = 390.0  # seconds for everything: a lent machine takes a command of ten minutes, and some of them go to imports
LIBRARIES = ("transformers", "accelerate", "lightning.fabric")

Tables = list[tuple[Grid, list[Figure]]]


@dataclass(frozen=True)
class Part:
    """Some tables; `seconds` is how long its timing goes on at most, at its fewest rounds beyond that."""

    seconds: float
    run: Callable[[float], Tables]
    builds: Callable[[], dict[str, Build]]  # what can be profiled


def parts(sizes: Scale, arguments: argparse.Namespace) -> dict[str, Part]:
    """Everything that can be measured, by the name it has on the command line."""

    def window(micro_batch: int, steps: int) -> Part:
        work = gpu_windows.workload(sizes, micro_batch, steps)

        def run(seconds: float) -> Tables:
            figures = gpu_windows.measure(
                sizes, micro_batch, steps, rounds=arguments.rounds, seconds=seconds, compiled=arguments.compile
            )
            return [(grid(work.name, "× full batch", figures), figures)]

        return Part(25.0 if micro_batch == 1 else 15.0, run, lambda: gpu_windows.contestants(sizes, work))

    def packing(seconds: float) -> Tables:
        figures = gpu_packing.measure(sizes, rounds=arguments.rounds, seconds=seconds)
        shape = sizes.ragged
        title = f"{shape.samples} sequences of log-normal length (mean {shape.mean}, longest {shape.longest:,})"
        return [(grid(title, "times faster", figures), figures)]

    def sizing(seconds: float) -> Tables:
        found = gpu_sizing.measure(sizes, rounds=arguments.rounds, seconds=seconds)
        title = f"{sizes.sizing} × {sizes.context:,} tokens in"
        return [(grid(f"{title} {budget}", "share of best", figures), figures) for budget, figures in found.items()]

    def llama(seconds: float) -> Tables:
        figures = gpu_llama.measure(sizes, seconds=seconds, every=arguments.all, say=_say)
        title = f"Llama-shaped 1B with LoRA in {sizes.llama_budget}, {sizes.llama_ragged.samples} sequences an update"
        return [(grid(title, "times faster", figures), figures)]

    return {
        **{gpu_windows.name_of(*pair): window(*pair) for pair in sizes.windows},
        gpu_packing.NAME: Part(
            20.0, packing, lambda: gpu_packing.contestants(sizes, gpu_packing.ragged_batches(sizes, 8))
        ),
        gpu_sizing.NAME: Part(30.0, sizing, dict),
        gpu_llama.NAME: Part(130.0, llama, lambda: gpu_llama.contestants(sizes, every=False)),
    }


def main() -> int:
    """Measure, show, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine can run; writes no files by itself")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these parts")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="timed rounds, at most (8)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help=f"seconds for everything ({LIMIT:g})")
    parser.add_argument("--all", action="store_true", help="HF Trainer's hopeless settings, too")
    parser.add_argument(
        "--compile", action="store_true", help="a torch.compile hand loop, too; compiling takes minutes"
    )
    parser.add_argument("--profile", default="", metavar="NAME", help="profile bigbatch on this part")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md; gpu-NAME with --only")
    arguments = parser.parse_args()
    sizes = scale(arguments.device, tiny=arguments.tiny)
    known = parts(sizes, arguments)
    if unknown := [name for name in (*arguments.only, arguments.profile) if name and name not in known]:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(known)}")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    # Lightning sets its loggers' levels when it is imported, so that comes first.
    for library in LIBRARIES:
        if find_spec(library.split(".", maxsplit=1)[0]):
            import_module(library)
    with silence(*LIBRARIES):
        if arguments.profile:
            return profile(known[arguments.profile], sizes)
        return measure({name: part for name, part in known.items() if name in (arguments.only or known)}, arguments)


def measure(chosen: dict[str, Part], arguments: argparse.Namespace) -> int:
    """Run the parts, and write what there is after each."""
    begun = time.perf_counter()
    report = Report("-".join(("gpu", *arguments.only)), this_machine(arguments.device), [], notes(), [])
    out = arguments.out or (None if arguments.tiny else RESULTS)
    failed = 0
    for name, part in chosen.items():
        start = time.perf_counter()
        left = arguments.limit - (start - begun)
        if left <= 0:
            report.notes.append(f"{name} was not run: the {arguments.limit:g} s were over.")
            continue
        try:
            tables = part.run(min(part.seconds, left))
        except Exception as error:  # noqa: BLE001  (the other parts still have something to say)
            report.notes.append(f"{name} failed: {type(error).__name__}: {error}")
            _say(report.notes[-1])
            failed += 1
            continue
        finally:
            report.notes.append(f"{name} took {time.perf_counter() - start:.0f} s.")
            _say(report.notes[-1])
        for table, figures in tables:
            report.grids.append(table)
            report.measured.extend(figures)
            show(table)
        if out is not None:
            report.write(out)
    summary = bars([figure for figure in report.measured if isinstance(figure, Figure)])
    show(summary)
    report.grids.insert(0, summary)
    if out is not None:
        report.write(out)
    for note in (*report.notes, report.machine.sentence()):
        print(note)
    return 1 if failed else 0


def bars(figures: list[Figure]) -> Grid:
    """All of our bars in one table."""
    rows: list[tuple[str, ...]] = [
        (
            figure.work,
            figure.contestant,
            "–" if figure.compared is None else f"{figure.compared:.3f}",
            figure.bar,
            "–" if figure.peak_ratio is None else f"{figure.peak_ratio:.3f}",
            figure.met,
        )
        for figure in figures
        if figure.bar
    ]
    return Grid("bigbatch's bars", ("", "", "measured", "must (stretch)", "peak / hand's", "met"), rows)


def profile(part: Part, sizes: Scale) -> int:
    """Print where the time of our updates goes."""
    for name, build in part.builds().items():
        if name.startswith(("bigbatch", "hand loop")):
            budget = in_bytes(sizes.llama_budget) if "automatic" in name else None
            try:
                with capped(budget, sizes.device):
                    for table in profiled(name, build, sizes.device):
                        show(table)
            except Exception as error:  # noqa: BLE001  (a variant that does not run yet should not hide the other)
                _say(f"{name}: {type(error).__name__}: {error}")
    return 0


def notes() -> list[str]:
    """Say what has to be known to read the tables."""
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "the default"
    said = f"""
ms: time per update, the median of interleaved rounds of one update each, in drawn order, ± half the interquartile
range; the device is drained around each. Llama: the mean of two updates, each contestant alone.

GiB: the peak, what the allocator had handed out at most, from building the model on, each contestant alone; "/ hand's"
is over the hand loop's. The allocator's settings: {allocator}.

Float32 parameters under bf16 autocast, fused AdamW, clipping at 1.0. Llama: frozen bf16 weights, float32 LoRA of rank
16 on queries and values, every layer checkpointed.

Hand loop, full batch, Accelerate and Fabric find their micro-batches on the device, and so does bigbatch where they are
of equal length. HF Trainer has its own loader; it is timed from one on_step_end to the next, without its NaN check,
which would wait for the device after every micro-batch.

Ragged batches arrive right-padded to their longest sequence. "Padded per micro-batch" trims each random micro-batch to
its own longest, outside the timed region; bigbatch gets the batch in host memory and sorts, packs, trims and moves
inside it.

Share of best: throughput as a share of the best by-hand size, of ours and the hand loop's, that fits.
"""
    return [" ".join(paragraph.split()) for paragraph in said.strip().split("\n\n")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

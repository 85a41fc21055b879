"""How long `bigbatch lint` takes for 1,000 files: small training scripts, and a library's large modules.

    python -m benchmarks.lint_speed

The scripts are those of tests/lint_corpus, over and over; nearly all of them train. The library is transformers, as
installed: few of its files train, and parsing is nearly all there is to do. Timed is the command as one types it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

from benchmarks.lint_accuracy import CORPUS
from benchmarks.report import Grid, show

FILES = 1000
BAR = 5.0  # seconds
RUNS = 5  # the machine is seldom quiet for all of them
COMMAND = "from bigbatch.cli import app; app()"  # what `bigbatch` runs


@dataclass(frozen=True)
class Timed:
    """Files of one kind, and how long the command took."""

    what: str
    files: int
    megabytes: float
    seconds: tuple[float, ...]
    processor: tuple[float, ...]  # the same without waiting for others on this machine


def scripts() -> list[Path]:
    """Return the corpus, over and over."""
    files = sorted(file for file in CORPUS.glob("*/*") if file.suffix in {".py", ".ipynb"})
    return list(islice(cycle(files), FILES))


def modules() -> list[Path]:
    """Return the largest library that the benchmarks install, every so manieth file of it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return files[:: max(len(files) // FILES, 1)][:FILES]


@contextmanager
def folder_of(files: list[Path]) -> Iterator[Path]:
    """Copy files into a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        for number, file in enumerate(files):
            shutil.copyfile(file, Path(name) / f"{number:04}_{file.name}")
        yield Path(name)


def measure(what: str, files: list[Path]) -> Timed:
    """Run the command a few times over all files."""
    seconds, processor = [], []
    with folder_of(files) as folder:
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        for _ in range(RUNS):
            start, busy = time.perf_counter(), _busy()
            subprocess.run(  # noqa: S603 - our own command
                [sys.executable, "-c", COMMAND, "lint", "--exit-zero", "--json", str(folder)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            seconds.append(time.perf_counter() - start)
            processor.append(_busy() - busy)
    return Timed(what, len(files), size, tuple(seconds), tuple(processor))


def _busy() -> float:
    """Return the processor time of all commands so far."""
    used = os.times()
    return used.children_user + used.children_system


def measure_all() -> list[Timed]:
    """Time both kinds."""
    kinds = {"training scripts": scripts(), "modules of transformers": modules()}
    return [measure(what, files) for what, files in kinds.items() if files]


def grid(timed: list[Timed]) -> Grid:
    """Return the table."""
    rows: list[tuple[str, ...]] = [
        (
            each.what,
            f"{each.files:,}",
            f"{each.megabytes:.1f} MB",
            f"{min(each.seconds):.2f} s",
            f"{max(each.seconds):.2f} s",
            f"{min(each.processor):.2f} s",
        )
        for each in timed
    ]
    return Grid("Time of the whole command", ("", "files", "size", f"best of {RUNS}", "worst", "processor time"), rows)


def main() -> int:
    """Time, show; fails where even the processor time is over the bar."""
    timed = measure_all()
    show(grid(timed))
    return int(any(min(each.processor) > BAR for each in timed))


if __name__ == "__main__":
    sys.exit(main())

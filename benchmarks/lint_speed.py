"""How long `bigbatch lint` takes for 1,000 files: small training scripts, and a library's large modules.

    python -m benchmarks.lint_speed

The scripts are the cases of tests/lint, over and over; nearly all of them train. The library is transformers, as
installed: few of its files train, and parsing is nearly all there is to do. Timed is the command as one types it.
"""

import os
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

from benchmarks.lint_accuracy import read_cases
from benchmarks.report import Grid, show

FILES = 1000
BAR = 3.0  # seconds
RUNS = 3  # the machine is seldom quiet for all of them
COMMAND = "from bigbatch.cli import app; app()"  # what `bigbatch` runs


@dataclass(frozen=True)
class Timed:
    """Files of one kind, and how long the command took."""

    what: str
    files: int
    megabytes: float
    seconds: tuple[float, ...]
    processor: tuple[float, ...]  # the same without waiting for others on this machine


def scripts() -> list[str]:
    """Return the cases, over and over."""
    return list(islice(cycle([case.script for case in read_cases()]), FILES))


def modules() -> list[str]:
    """Return the largest library that the benchmarks install, every so manieth file of it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return [file.read_text() for file in files[:: max(len(files) // FILES, 1)][:FILES]]


@contextmanager
def folder_of(files: list[str]) -> Iterator[Path]:
    """Write scripts into a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        for number, text in enumerate(files):
            (Path(name) / f"{number:04}.py").write_text(text)
        yield Path(name)


def measure(what: str, files: list[str]) -> Timed:
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

"""The gate that a change of the inside passes: every test on a GPU, and the graph rows beside the code before it.

    python -m benchmarks.gate --before FOLDER   # a checkout of the code before; nine minutes on one large GPU
    python -m benchmarks.gate --before FOLDER --device cpu --tiny --no-tests   # does it run?

Each row is one process of the code before, one of the code at hand and one of what both are compared with, timed in
turn round after round: a ratio compares two timings of one round. `before again` is the code before in a second
process: how far that is from 1 is what the method cannot tell.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Grid, Report, show

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("gate_worker.py")
ROWS = (
    "1x32 graph",
    "4x8 graph",
    "8x8 graph",
    "ResNet-18 kept, graph",
    "ResNet-18 offloaded, graph",
    "small towers recomputed, graph",
    "large towers recomputed",
)
ALLOWED = 0.02  # slower than before, beyond what the code before differs from itself


class Side:
    """A process that times one contestant of one checkout."""

    def __init__(self, checkout: Path, device: str, *, tiny: bool) -> None:
        """Start it; imports take a while, and all sides import at once."""
        path = os.pathsep.join(str(checkout / each) for each in ("src", "."))
        command = [sys.executable, str(WORKER), device, *(["--tiny"] if tiny else [])]
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Ask and wait for the answer; a process that is gone is an answer, too."""
        assert self._process.stdin is not None  # noqa: S101 - opened above
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@dataclass
class Row:
    """What came out of one row: seconds per update by side, and peaks in bytes."""

    name: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, one: str, other: str) -> float | None:
        """Return the median over rounds of one side's time to another's."""
        pairs = list(zip(self.seconds.get(one, []), self.seconds.get(other, []), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None

    @property
    def passed(self) -> bool | None:
        """Whether the code at hand is no slower than the code before can be told from itself, and two per cent."""
        now, again = self.ratio("now", "before"), self.ratio("before again", "before")
        if now is None or again is None:
            return None
        return now <= 1 + abs(again - 1) + ALLOWED


def measure(name: str, sides: dict[str, tuple[Side, str]], *, rounds: int, end: float) -> Row:
    """Build all sides of a row one after the other, then time them in turn."""
    row = Row(name)
    for side, (process, which) in sides.items():
        answer = process.ask(build=name, which=which)
        if "error" in answer:
            row.errors[side] = answer["error"]
        else:
            row.peaks[side] = answer["peak"]
    timed = [side for side in sides if side not in row.errors]
    for number in range(rounds):
        if number >= 3 and time.perf_counter() > end:
            break
        for side in timed if number % 2 else reversed(timed):
            answer = sides[side][0].ask(time=1)
            if "error" in answer:
                row.errors[side] = answer["error"]
            else:
                row.seconds.setdefault(side, []).append(answer["seconds"])
    return row


def grid(rows: list[Row]) -> Grid:
    """Ratios and peaks."""

    def told(ratio: float | None) -> str:
        return "–" if ratio is None else f"{ratio:.3f}"

    def peak(row: Row, one: str, other: str) -> str:
        known = row.peaks.get(one), row.peaks.get(other)
        return f"{known[0] / known[1]:.3f}" if known[0] and known[1] else "–"

    verdicts = {True: "yes", False: "no", None: "–"}
    return Grid(
        "The code at hand beside the code before it: median of rounds",
        (
            "",
            "now / before",
            "before again / before",
            "now / compared",
            "peak: now / before",
            "peak / compared",
            "passed",
        ),
        [
            (
                row.name,
                told(row.ratio("now", "before")),
                told(row.ratio("before again", "before")),
                told(row.ratio("now", "compared")),
                peak(row, "now", "before"),
                peak(row, "now", "compared"),
                "; ".join(f"{side}: {error}" for side, error in row.errors.items()) or verdicts[row.passed],
            )
            for row in rows
        ],
    )


def run_tests(jobs: int) -> str:
    """Run every test marked `cuda`, the real out-of-memory ones last and alone; returns what was counted."""
    base = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-q", "-m", "cuda", "tests"]
    parallel = ["-n", str(jobs), "--dist", "loadscope"] if jobs > 1 and find_spec("xdist") else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    told = []
    for chosen in (["-k", "not for_real", *parallel], ["-k", "for_real"]):
        done = subprocess.run(  # noqa: S603 - our own tests
            [*base, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        lines = done.stdout.strip().splitlines()
        told += [line for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[-1:]
    return "\n".join(told)


def main() -> int:
    """Run the tests, then the rows; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the code before")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine can run; writes no files by itself")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=22.0, help="for the timing of each row, at most")
    parser.add_argument("--jobs", type=int, default=4, help="processes that run tests, where pytest-xdist is there")
    parser.add_argument("--only", nargs="+", default=ROWS, metavar="ROW", help="these rows")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-rows", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for gate.json and gate.md")
    chosen = parser.parse_args()
    before, out = chosen.before.resolve(), chosen.out or (None if chosen.tiny else RESULTS)
    notes = []
    if not chosen.no_tests:
        start = time.perf_counter()
        notes.append(f"Tests marked cuda: {run_tests(chosen.jobs)} ({time.perf_counter() - start:.0f} s)")
        print(notes[-1], flush=True)
    rows: list[Row] = []
    for name in () if chosen.no_rows else chosen.only:
        start = time.perf_counter()
        checkouts = {"before": before, "now": ROOT, "before again": before, "compared": ROOT}
        sides = {
            side: (Side(checkout, chosen.device, tiny=chosen.tiny), "beside" if side == "compared" else "ours")
            for side, checkout in checkouts.items()
        }
        try:
            rows.append(measure(name, sides, rounds=chosen.rounds, end=time.perf_counter() + 40 + chosen.seconds))
        finally:
            for process, _ in sides.values():
                process.end()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        report = Report("gate", this_machine(chosen.device), [grid(rows)], notes, list(rows))
        if out is not None:
            report.write(out)
    if rows:
        show(grid(rows))
    return 1 if any(row.passed is False or row.errors for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

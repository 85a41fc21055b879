"""How often ranks talk and how much they send per update, by the number of micro-batches in it.

python -m benchmarks.wire [--ranks 2 4] [--steps 1 8 64] [--json] [--out FOLDER]
"""

import argparse
import sys
from pathlib import Path

from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Grid, Report
from benchmarks.wire_counting import Wire, count, quiet_loopback
from benchmarks.wire_loops import OURS, plain_model

RANKS, STEPS = [2, 4], [1, 2, 4, 8, 16, 32, 64]
NOTES = [
    (
        "Real processes on a real gloo group, on one machine. Collectives and the bytes handed to them are what "
        "torch's profiler saw the backend do on the first rank (`gloo:all_reduce`, `gloo:broadcast`, ..., with shapes "
        "and dtypes), barriers of the benchmark itself left out: the third update of each."
    ),
    (
        "bigbatch sends one message of 40 float64 numbers (320 bytes: counts, loss, flags) and then the gradients. DDP "
        "sends its gradients in buckets, a first one of about 1 MiB and then of 25 MiB; bigbatch in buckets of 32 MiB."
    ),
    (
        "The last tables are the kernel's own count of the loopback interface, all ranks together, the fewer of two "
        "updates: all that was sent, with the headers of TCP and IP. An all-reduce of b bytes over n ranks sends at "
        "least 2 (n - 1) b."
    ),
]


def main() -> int:
    """Count, show, keep. Fails where ours sends more for more micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="processes in a group")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="micro-batches in an update")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for wire.json and wire.md")
    options = parser.parse_args()
    found = [each for ranks in options.ranks for each in count(ranks, options.steps)]
    report = Report("wire", this_machine(), grids(found), notes(), list(found))
    report.show(as_json=options.json)
    report.write(options.out)
    return int(not independent_of_steps(found))


def independent_of_steps(found: list[Wire]) -> bool:
    """Whether our loops send the same however many micro-batches an update has."""
    sent = {(each.ranks, each.loop): (each.collectives, each.bytes) for each in found if each.loop in OURS}
    return all((each.collectives, each.bytes) == sent[each.ranks, each.loop] for each in found if each.loop in OURS)


def notes() -> list[str]:
    """What has to be known to read the tables."""
    size = sum(p.numel() * p.element_size() for p in plain_model().parameters())
    own = "" if quiet_loopback() else " Other processes of the machine use that interface, too."
    return [f"The model's gradients are {size:,} bytes in float32.", *NOTES[:-1], NOTES[-1] + own]


def grids(found: list[Wire]) -> list[Grid]:
    """One table of each measure and number of ranks."""
    made = []
    for title, shown in (
        ("collectives per update", lambda each: f"{each.collectives:g}"),
        ("bytes handed to them per update, each rank", lambda each: f"{each.bytes:,.0f}"),
        ("bytes on the loopback interface per update, all ranks together", _loopback),
    ):
        for ranks in dict.fromkeys(each.ranks for each in found):
            here = [each for each in found if each.ranks == ranks]
            steps = list(dict.fromkeys(each.steps for each in here))
            rows = [
                (loop, *(shown(next(e for e in here if (e.loop, e.steps) == (loop, number))) for number in steps))
                for loop in dict.fromkeys(each.loop for each in here)
            ]
            header = ("micro-batches per update:", *map(str, steps))
            made.append(Grid(f"{ranks} ranks: {title}", header, rows))
    return made


def page_table(found: list[Wire], ranks: int = 4, steps: tuple[int, ...] = (1, 8, 64)) -> str:
    """Return what the page on several devices shows of it."""
    lines = [
        "| micro-batches per update | " + " | ".join(f"{number}" for number in steps) + " | |",
        "|---|" + "---|" * len(steps) + "---|",
    ]
    of = {(each.loop, each.steps): each for each in found if each.ranks == ranks}
    for loop in dict.fromkeys(each.loop for each in found):
        sent = [f"{of[loop, number].bytes:,}" for number in steps]
        collectives = ", ".join(str(of[loop, number].collectives) for number in steps)
        lines.append(f"| {loop} | {' | '.join(sent)} | in {collectives} collectives |")
    return "\n".join(lines) + "\n"


def _loopback(each: Wire) -> str:
    return "–" if each.loopback is None else f"{each.loopback:,.0f}"


if __name__ == "__main__":
    sys.exit(main())

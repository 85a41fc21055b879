"""How good and how fast `bigbatch lint` is, in one report.

python -m benchmarks.lint [--json] [--out FOLDER]
"""

import argparse
import sys
from pathlib import Path

from benchmarks import lint_accuracy, lint_consequences, lint_speed, lint_unseen
from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Report

NOTES = [
    (
        "Counted are pairs of a script and a rule: labelled and reported is found, reported and neither labelled nor "
        "allowed is a false alarm."
    ),
    (
        "Unseen: each set was labelled before the linter was run on it, and its faults were repaired afterwards. The "
        "first three rows are of an earlier linter, which followed conditions by symbols. The last row is of the "
        "present one, which runs the loop: 248 scripts were parted by a hash of their names "
        "(`benchmarks/lint_unseen.py`), it was tuned on one half and on 225 short loops, and this is its first look at "
        "the other. Its patterns of names come from the earlier linter, which had been tuned on both halves, and its "
        "prototype had seen an unknown half; scripts that nobody here has seen may do worse."
    ),
    (
        "What a mistake costs: the textbook's experiment on 63 batches of 16 in windows of 4, one epoch in float64; "
        "how far the weights end from those of true batches of 64, relative to how far these have moved "
        "(`benchmarks/lint_consequences.py`)."
    ),
    (
        "Other work ran on the machine while the time was taken: the best run is nearest to a quiet one, and the "
        "processor time is what the command itself uses, in one process."
    ),
]


def main() -> int:
    """Measure, show, keep. Fails where something is missed, a false alarm, or too slow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for lint.json and lint.md")
    options = parser.parse_args()
    judged, timed = lint_accuracy.judge_all(), lint_speed.measure_all()
    scores = lint_accuracy.scores(judged)
    found = lint_consequences.costs()
    grids = [lint_accuracy.grid(judged), lint_unseen.grid(), lint_consequences.grid(found), lint_speed.grid(timed)]
    report = Report("lint", this_machine(), grids, NOTES, [*scores, *lint_unseen.FIRST_LOOKS, *found, *timed])
    report.show(as_json=options.json)
    report.write(options.out)
    wrong = any(score.false or score.found < score.expected for score in scores)
    return int(wrong or any(min(each.processor) > lint_speed.BAR for each in timed))


if __name__ == "__main__":
    sys.exit(main())

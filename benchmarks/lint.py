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
        "Unseen: each set was written and labelled before the linter was run on it, as scripts on the internet are "
        "written, and its faults were understood and repaired afterwards. The figures include rules that have been "
        "removed since. Of the 4 false alarms among the 87, one was right and the label had been forgotten. Of the 6 "
        "mistakes missed there, one still is: a mean over a list of losses that are already divided. And one that was "
        "found is no longer reported, a division in a Trainer's compute_loss, since Trainer itself divides for some "
        "models only. Scripts that taught something joined the corpus. The first table, over the corpus, says that "
        "nothing known there is wrong; for scripts that nobody here has seen, this one is the better guess."
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

"""What `bigbatch lint` found in scripts on its first look at them: records, which cannot be measured a second time.

Each set was written and labelled before the linter was run on any of it, and the linter was repaired afterwards. Labels
are counted as they were first written.
"""

import hashlib
from dataclasses import dataclass

from benchmarks.report import Grid


@dataclass(frozen=True)
class FirstLook:
    """One set of scripts, and how the linter fared before it was tuned on them."""

    date: str
    what: str
    scripts: int
    wrong: int  # how many of them hold a mistake that is more than a hint
    labelled: int
    found: int
    false: int

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        precision, recall = self.found / (self.found + self.false), self.found / self.labelled
        counts = (str(number) for number in (self.scripts, self.wrong, self.labelled, self.found, self.false))
        return self.what, self.date, *counts, f"{precision:.3f}", f"{recall:.3f}"


FIRST_LOOKS = (
    FirstLook("2026-11-15", "the corpus, before any repair", 240, 133, 169, 144, 17),
    FirstLook("2026-11-15", "other scripts, after the corpus was understood", 87, 45, 65, 59, 4),
    FirstLook("2026-11-15", "others again, after those", 16, 8, 10, 9, 1),
    FirstLook("2026-11-18", "the half set aside, by the linter that runs the loop", 135, 67, 84, 78, 2),
)
# Which cases are set aside: names whose hash is odd. The linter that runs the loop was tuned on the others alone.


def is_set_aside(name: str) -> bool:
    """Tell whether a case belongs to the half that the linter was first measured on."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def grid() -> Grid:
    """Return the table."""
    header = ("", "date", "scripts", "of them wrong", "labelled", "found", "false alarms", "precision", "recall")
    return Grid("Precision and recall on scripts it had not seen", header, [each.row() for each in FIRST_LOOKS])

"""How often `bigbatch lint` is right: precision and recall over the labelled cases in tests/lint/cases.

    python -m benchmarks.lint_accuracy

Counted are pairs of a case and a rule.
"""

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Grid, show
from bigbatch_lint.output.check import check
from bigbatch_lint.reading.source import read_source
from bigbatch_lint.rules import RULES

CASES = Path(__file__).parent.parent / "tests" / "lint" / "cases"
_HEADER = re.compile(r"^# --- (?P<name>\w+)(?P<head> \(after the head\))?: (?P<labels>.*)\n", re.MULTILINE)
_ON_LINE = re.compile(r"# expect: (BB\d{3}(?:, BB\d{3})*)")
HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

from data import loader, stream

model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
accumulation_steps = 4
"""


@dataclass(frozen=True)
class Case:
    """A script, and which rules it breaks; a code in parentheses may be reported or not."""

    name: str
    script: str
    expected: frozenset[str]
    allowed: frozenset[str]


def read_cases() -> Iterator[Case]:
    """Read `# --- name: BB103, (BB201)` and the script below it, up to the next such line; some follow the HEAD."""
    for file in sorted(CASES.glob("*.py")):
        _, *parts = re.split(r"^(?=# --- )", file.read_text(), flags=re.MULTILINE)
        for part in parts:
            header = _HEADER.match(part)
            if header is None:
                message = f"{file.name}: {part.splitlines()[0]}"
                raise ValueError(message)
            body = part[header.end() :].rstrip() + "\n"
            labels = header["labels"]
            allowed = frozenset(re.findall(r"\((BB\d{3})\)", labels))
            expected = frozenset(re.findall(r"BB\d{3}", labels)) - allowed
            yield Case(header["name"], (HEAD if header["head"] else "") + body, expected, allowed)


def codes(script: str) -> list[str]:
    """Return the codes of what is found in a script, each once."""
    return sorted({finding.code for finding in check(read_source("train.py", textwrap.dedent(script).encode()))})


@dataclass(frozen=True)
class Judged:
    """One case: what its labels say, and what was found."""

    case: Case
    reported: frozenset[str]
    lines: frozenset[tuple[str, str]]  # code, and the labelled line
    shown: frozenset[tuple[str, str]]  # code, and the line it was reported on

    def found(self) -> frozenset[str]:
        """Return what is there and was found."""
        return self.case.expected & self.reported

    def missed(self) -> frozenset[str]:
        """Return what is there and was not found."""
        return self.case.expected - self.reported

    def false(self) -> frozenset[str]:
        """Return what was found and is not there."""
        return self.reported - self.case.expected - self.case.allowed

    def in_place(self) -> frozenset[str]:
        """Return what was found on a line that is labelled with it, of what is labelled on lines at all."""
        return frozenset(code for code, _ in self.shown & self.lines)


def judge(case: Case) -> Judged:
    """Check a case."""
    findings = check(read_source("train.py", case.script.encode()))
    lines = case.script.split("\n")
    labelled = {(code, line) for line in lines for each in _ON_LINE.findall(line) for code in each.split(", ")}
    shown = frozenset((finding.code, lines[finding.line - 1]) for finding in findings)
    return Judged(case, frozenset(code for code, _ in shown), frozenset(labelled), shown)


def judge_all() -> list[Judged]:
    """Check every case."""
    return [judge(case) for case in read_cases()]


@dataclass(frozen=True)
class Score:
    """Of one rule, or of several together."""

    name: str
    expected: int
    found: int
    false: int
    on_lines: int  # of those found, how many are labelled on a line
    in_place: int  # and how many of these were found there

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        reported = self.found + self.false
        precision = f"{self.found / reported:.3f}" if reported else "–"
        recall = f"{self.found / self.expected:.3f}" if self.expected else "–"
        where = f"{self.in_place} of {self.on_lines}" if self.on_lines else "–"
        return self.name, str(self.expected), str(self.found), str(self.false), precision, recall, where


def scores(judged: list[Judged]) -> list[Score]:
    """One score for each rule that is labelled anywhere, and one for all of them."""
    expected = Counter(code for each in judged for code in each.case.expected)
    found = Counter(code for each in judged for code in each.found())
    false = Counter(code for each in judged for code in each.false())
    labelled = Counter(code for each in judged for code in each.found() & {code for code, _ in each.lines})
    in_place = Counter(code for each in judged for code in each.in_place() & each.found())
    rows = [
        Score(f"{code} {RULES[code].slug}", expected[code], found[code], false[code], labelled[code], in_place[code])
        for code in sorted(expected | false)
    ]
    counts = [counter.total() for counter in (expected, found, false, labelled, in_place)]
    return [*rows, Score("all", *counts)]


def grid(judged: list[Judged]) -> Grid:
    """Return the table."""
    wrong = sum(bool(each.case.expected) for each in judged)
    title = f"Precision and recall over {len(judged)} cases, {len(judged) - wrong} correct and {wrong} wrong"
    header = ("", "labelled", "found", "false alarms", "precision", "recall", "on the labelled line")
    return Grid(title, header, [score.row() for score in scores(judged)])


def main() -> int:
    """Judge, show; fails where something is missed or a false alarm."""
    judged = judge_all()
    show(grid(judged))
    wrong = 0
    for each in judged:
        for code in sorted(each.missed() | each.false()):
            wrong += 1
            print(f"{'missed' if code in each.missed() else 'false alarm'}: {code} in {each.case.name}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

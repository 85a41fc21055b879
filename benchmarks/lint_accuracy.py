"""How often `bigbatch lint` is right: precision and recall over the labelled scripts in tests/lint_corpus.

    python -m benchmarks.lint_accuracy

Counted are pairs of a file and a rule, as the corpus's README says.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Grid, show
from bigbatch_lint.check import check
from bigbatch_lint.finding import Finding
from bigbatch_lint.rules import RULES
from bigbatch_lint.source import Source, read_source

CORPUS = Path(__file__).parent.parent / "tests" / "lint_corpus"
_LABEL = re.compile(r"#\s*(expect|expect-file|allow-file):\s*((?:BB\d{3}[,\s]*)+)")


@dataclass(frozen=True)
class Judged:
    """One script: what its labels say, and what was found."""

    file: Path
    expected: frozenset[str]
    allowed: frozenset[str]
    lines: frozenset[tuple[str, str]]  # code, and the labelled line as it is written
    findings: tuple[Finding, ...]
    texts: tuple[str, ...]  # the lines the findings stand on

    @property
    def reported(self) -> frozenset[str]:
        """The codes of what was found."""
        return frozenset(finding.code for finding in self.findings)

    def found(self) -> frozenset[str]:
        """What is there and was found."""
        return self.expected & self.reported

    def missed(self) -> frozenset[str]:
        """What is there and was not found."""
        return self.expected - self.reported

    def false(self) -> frozenset[str]:
        """What was found and is not there."""
        return self.reported - self.expected - self.allowed

    def in_place(self) -> frozenset[str]:
        """What was found on a line that is labelled with it, of what is labelled on lines at all."""
        shown = {(f.code, text) for f, text in zip(self.findings, self.texts, strict=True)}
        return frozenset(code for code, _ in shown & self.lines)


def judge(file: Path) -> Judged:
    """Read a script and its labels."""
    raw = file.read_bytes().decode("utf-8", errors="replace")
    labels: dict[str, set[str]] = {"expect": set(), "expect-file": set(), "allow-file": set()}
    for kind, codes in _LABEL.findall(raw):
        labels[kind] |= set(re.findall(r"BB\d{3}", codes))
    source = read_source(str(file))
    findings = tuple(check(source))
    return Judged(
        file,
        frozenset(labels["expect"] | labels["expect-file"]),
        frozenset(labels["allow-file"]),
        _labelled_lines(source),
        findings,
        tuple(_text(source, finding) for finding in findings),
    )


def _labelled_lines(source: Source) -> frozenset[tuple[str, str]]:
    found = set()
    for line in source.text.split("\n"):
        for kind, codes in _LABEL.findall(line):
            found |= {(code, line.strip()) for code in re.findall(r"BB\d{3}", codes) if kind == "expect"}
    return frozenset(found)


def _text(source: Source, finding: Finding) -> str:
    first = 1
    if source.notebook is not None:
        first = next((cell.first_line for cell in source.notebook.cells if cell.number == finding.cell), 1)
    lines = source.text.split("\n")
    place = first + finding.line - 2
    return lines[place].strip() if place < len(lines) else ""


def judge_all() -> list[Judged]:
    """Judge every script of the corpus."""
    files = sorted(file for file in CORPUS.glob("*/*") if file.suffix in {".py", ".ipynb"})
    return [judge(file) for file in files]


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
    expected = Counter(code for each in judged for code in each.expected)
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
    wrong = sum(bool(each.expected) for each in judged)
    title = f"Precision and recall over {len(judged)} scripts, {len(judged) - wrong} correct and {wrong} wrong"
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
            print(f"{'missed' if code in each.missed() else 'false alarm'}: {code} in {each.file.name}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Findings, as text for people and JSON for programs."""

import shutil
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from unicodedata import category

_LONGEST = 160  # characters of a line that are shown
_READABLE = 100
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode's categories


@dataclass(frozen=True, order=True)
class Finding:
    """One mistake at one place; lines and columns count from 1, in a notebook within their cell."""

    path: str
    cell: int  # of a notebook, from 1; 0 in a plain file
    line: int
    column: int
    code: str
    slug: str
    severity: str
    message: str
    remedy: str
    end_line: int
    text: str  # the line, as it is written

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON; a plain file has no cell."""
        return {key: value for key, value in {**asdict(self), "cell": self.cell or None}.items() if key != "text"}


def escaped(text: str) -> str:
    """Return text without what moves a cursor, sets a title or turns a line round: names may hold anything."""
    return "".join(c if c == "\t" or category(c) not in _UNSEEN else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str) -> str:
    """Return a line as several that fit the terminal; words stay whole."""
    width = min(shutil.get_terminal_size().columns, _READABLE)
    wrapper = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(escaped(text))


def as_text(finding: Finding) -> str:
    """Say where, what, the line itself, and what to do."""
    cell = f"cell {finding.cell}:" if finding.cell else ""
    place = escaped(f"{finding.path}:{cell}{finding.line}:{finding.column}")
    line = escaped(finding.text)
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
    parts = [f"{place}: {finding.code} {finding.severity} {finding.slug}", *([f"    {line}"] if line else [])]
    return "\n".join([*parts, wrapped(f"  {finding.message}"), wrapped(f"  fix: {finding.remedy}"), "\n"])


def summary(findings: list[Finding], files: int) -> str:
    """Say how many findings of which severity there are."""
    counts = sorted(Counter(finding.severity for finding in findings).items())
    parts = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts]
    read = f"{files} file{'s' * (files != 1)} read."
    return f"Found {', '.join(parts)} in {read}" if parts else f"All checks passed: {read}"

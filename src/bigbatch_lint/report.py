"""Findings as text for people, JSON for programs, and annotations for GitHub."""

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from unicodedata import category

from bigbatch_lint.finding import Finding
from bigbatch_lint.rules import Severity
from bigbatch_lint.runner import Checked

_COLORS = {Severity.ERROR: "\x1b[1;31m", Severity.WARNING: "\x1b[1;33m"}
_LONGEST = 160  # characters of a line that are shown
_READABLE = 100
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode's categories


def escaped(text: str) -> str:
    """Return text without what moves a cursor, sets a title or turns a line round: names may hold anything."""
    return "".join(c if c == "\t" or category(c) not in _UNSEEN else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str) -> str:
    """Return a line as several that fit the terminal; words stay whole."""
    width = min(shutil.get_terminal_size().columns, _READABLE)
    lines = textwrap.wrap(
        escaped(text), width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def as_text(checked: Checked) -> str:
    """Say where, what, the line itself, and what to do."""
    colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    parts = []
    for finding in checked.findings:
        line = escaped(checked.source.line(finding.cell, finding.line))
        line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
        code = f"{_COLORS[finding.severity]}{finding.code}\x1b[0m" if colored else finding.code
        parts.append(f"{escaped(finding.place())}: {code} {finding.severity.value} {finding.slug}")
        parts += [f"    {line}"] if line else []
        parts += [wrapped(f"  {finding.message}"), wrapped(f"  fix: {finding.remedy}"), ""]
    return "".join(f"{part}\n" for part in parts)


def summary(findings: list[Finding], files: int) -> str:
    """Say how many findings of which severity there are."""
    read = f"{files} file{'' if files == 1 else 's'} read."
    counts = Counter(finding.severity.value for finding in findings)
    parts = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in sorted(counts.items())]
    return f"Found {', '.join(parts)} in {read}" if parts else f"All checks passed: {read}"


def as_json(findings: list[Finding]) -> str:
    """Return all findings as one list."""
    return json.dumps([finding.as_dict() for finding in findings], indent=2)


def as_github(finding: Finding) -> str:
    """Return a finding as GitHub's runners turn it into an annotation."""
    place = f"file={_percent_encoded(finding.path)}"
    title = f"{finding.code} {finding.slug}"
    if finding.cell:  # its line is the cell's, and GitHub would look for it in the JSON
        title += f" (cell {finding.cell}, line {finding.line})"
    else:
        place += f",line={finding.line},endLine={finding.end_line},col={finding.column}"
    message = _percent_encoded(f"{finding.message}; fix: {finding.remedy}", of_message=True)
    return f"::{finding.severity.value} {place},title={_percent_encoded(title)}::{message}"


def _percent_encoded(text: str, *, of_message: bool = False) -> str:
    text = escaped(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
    return text if of_message else text.replace(":", "%3A").replace(",", "%2C")

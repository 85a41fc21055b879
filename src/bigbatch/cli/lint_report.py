"""Findings as text for people, JSON for programs, and annotations for GitHub."""

import json
from collections import Counter

from rich.console import Console
from rich.text import Text

from bigbatch.cli.terminal import escaped, wrapped
from bigbatch.lint.finding import Finding, Severity
from bigbatch.lint.linting import Checked

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow"}
_LONGEST = 160  # characters of a line that are shown
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning"}


def as_text(console: Console, checked: Checked) -> None:
    """Print where, what, the line itself, and what to do."""
    for finding in checked.findings:
        head = Text(f"{escaped(finding.place())}: ")
        head.append(finding.code, _STYLES[finding.severity])
        head.append(f" {finding.severity.value} {finding.slug}")
        console.print(head, soft_wrap=True)
        line = _line(checked, finding)
        if line:
            console.print(Text(f"    {line}", "dim"), soft_wrap=True)
        console.print(wrapped(f"  {finding.message}", console.width), markup=False, soft_wrap=True)
        console.print(wrapped(f"  fix: {finding.remedy}", console.width), markup=False, soft_wrap=True)
        console.print()


def _line(checked: Checked, finding: Finding) -> str:
    source = checked.source
    first = 1
    if source.notebook is not None:
        first = next((cell.first_line for cell in source.notebook.cells if cell.number == finding.cell), 1)
    lines = source.text.split("\n")
    place = first + finding.line - 2
    line = escaped(lines[place].strip()) if place < len(lines) else ""
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def summary(findings: list[Finding], files: int) -> str:
    """Say how many of which severity; how to read more."""
    if not findings:
        return f"All checks passed: {files} file{'' if files == 1 else 's'} read."
    counts = Counter(finding.severity for finding in findings)
    parts = [
        f"{counts[severity]} {severity.value}{'' if counts[severity] == 1 else 's'}"
        for severity in Severity
        if counts[severity]
    ]
    return f"Found {', '.join(parts)} in {files} file{'' if files == 1 else 's'} read."


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
    return f"::{_LEVELS[finding.severity]} {place},title={_percent_encoded(title)}::{message}"


def _percent_encoded(text: str, *, of_message: bool = False) -> str:
    text = escaped(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
    return text if of_message else text.replace(":", "%3A").replace(",", "%2C")

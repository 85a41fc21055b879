"""From paths to findings, and findings as text for people and JSON for programs."""

import os
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from unicodedata import category

from bigbatch_lint.output.config import EXCLUDED, Settings, files_in, is_excluded, read_settings, settings_of
from bigbatch_lint.reading.source import Source, read_noqa, read_source
from bigbatch_lint.rules import RULES, find

# A file without one of each holds no training loop, and is not run.
_GRADIENTS = ("backward", "_grad", "training_step")
_STEPS = ("zero_grad", "step(", "Accumulator", "def training_step", "clear_grad")
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


Checked = tuple[list[Finding], tuple[str, ...]]  # what is found, and why something was not checked


def lint(paths: list[Path], command: Settings) -> Iterator[Checked]:
    """Check all files below paths, one after the other; `command` is what the command line says."""
    read = cache(read_settings)
    for file in dict.fromkeys(files_in(paths, (*EXCLUDED, *command.exclude))):
        # Unlike Path.resolve, realpath takes a link that leads to itself for what it is.
        real = Path(os.path.realpath(file))
        settings = settings_of(real, read)
        if not is_excluded(real, settings.folder, settings.exclude):
            yield check_source(read_source(str(file)), settings.codes(command))


def check_source(source: Source, codes: Collection[str]) -> Checked:
    """Return what is found in a file, and why it, or a cell, was not checked; a failure of ours is no finding."""
    try:
        return check(source, codes), source.problems
    except RecursionError:
        why = "it is nested too deeply"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other files are checked
        why = f"bigbatch lint failed on it, please report: {type(error).__name__}: {error}"
    return [], (f"{source.path}:1:1: cannot be checked: {why}",)


def check(source: Source, codes: Collection[str] = frozenset(RULES)) -> list[Finding]:
    """Return what the chosen rules find in a file, sorted, without what its comments silence."""
    text = source.text
    trains = any(word in text for word in _GRADIENTS) and any(word in text for word in _STEPS)
    hits = [hit for hit in find(source.tree) if hit[0] in codes] if trains else []
    silenced = read_noqa(text) if hits else {}
    lines = text.split("\n")
    found = set()
    for code, node, message in hits:
        first, rule = getattr(node, "lineno", 1), RULES[code]
        body = getattr(node, "body", None)
        # Where a statement ends; of one that holds others, its head.
        last = max(first, body[0].lineno - 1 if isinstance(body, list) else getattr(node, "end_lineno", first))
        if not code.startswith(tuple(each for line in (0, *range(first, last + 1)) for each in silenced.get(line, ()))):
            place = (source.path, *source.place(first), getattr(node, "col_offset", 0) + 1)
            end = place[2] + last - first
            said = (rule.slug, rule.severity, message, rule.remedy)
            found.add(Finding(*place, code, *said, end, lines[first - 1].strip()))
    return sorted(found)


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
    counts = Counter(finding.severity for finding in findings)
    *parts, read = (f"{count} {name}{'s' * (count != 1)}" for name, count in [*sorted(counts.items()), ("file", files)])
    return f"Found {', '.join(parts)} in {read} read." if parts else f"All checks passed: {read} read."

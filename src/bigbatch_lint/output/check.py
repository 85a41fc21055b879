"""From paths to findings: which files, which rules for each, what they find."""

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bigbatch_lint.output.config import Settings, settings_of
from bigbatch_lint.output.files import EXCLUDED, files_in, is_left_out
from bigbatch_lint.reading.noqa import read_noqa
from bigbatch_lint.reading.source import Source, read_source
from bigbatch_lint.rules import RULES, find

_GRADIENTS = ("backward", "_grad", "training_step", "compute_loss")
_STEPS = ("zero_grad", "step(", "Accumulator", "def training_step", "def compute_loss", "clear_grad")
_CLOSED = re.compile(r":\s*(#.*)?$")  # the end of a head


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

    def place(self) -> str:
        """Where it is, as editors and terminals read it."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON; a plain file has no cell."""
        plain = {**asdict(self), "cell": self.cell or None}
        del plain["text"]
        return plain


def lint(paths: list[Path], command: Settings) -> Iterator[tuple[list[Finding], tuple[str, ...]]]:
    """Check all files below paths, one after the other; `command` is what the command line says."""
    known: dict[Path, Settings | None] = {}
    named = {path for path in paths if not path.is_dir()}
    everywhere = (*EXCLUDED, *command.exclude)
    for file in files_in(paths, everywhere):
        settings = settings_of(file, known)
        asked = file in named and not command.force_exclude
        left_out = is_left_out(file, settings.folder, settings.exclude)
        left_out |= file in named and is_left_out(file, Path.cwd(), everywhere)
        if asked or not left_out:
            yield check_source(read_source(str(file)), settings.codes(command))


def check_source(source: Source, codes: Collection[str]) -> tuple[list[Finding], tuple[str, ...]]:
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
    # A file that holds no training loop is parsed, but not run.
    if not (any(word in text for word in _GRADIENTS) and any(word in text for word in _STEPS)):
        return []
    hits = [(code, hit) for code, hit in find(source.tree) if code in codes]
    silenced = read_noqa(text) if hits else {}
    lines = text.split("\n")
    found = set()
    for code, hit in hits:
        first, rule = getattr(hit.node, "lineno", 1), RULES[code]
        last = _last_line(lines, hit.node, first)
        if code.startswith((*silenced.get(0, ()), *silenced.get(first, ()), *silenced.get(last, ()))):
            continue
        cell, line = source.place(first)
        place = (source.path, cell, line, getattr(hit.node, "col_offset", 0) + 1)
        said = (rule.slug, rule.severity, hit.message, rule.remedy)
        found.add(Finding(*place, code, *said, line + last - first, lines[first - 1].strip()))
    return sorted(found)


def _last_line(lines: list[str], node: ast.AST, first: int) -> int:
    """Return where a statement ends; of one that holds others, its head."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return getattr(node, "end_lineno", None) or first
    head = getattr(node, "test", None) or getattr(node, "iter", None)
    last: int = getattr(head, "end_lineno", None) or first
    # `):` may stand on a line of its own.
    rest = lines[last - 1 : body[0].lineno - 1]
    return next((last + more for more, line in enumerate(rest) if _CLOSED.search(line)), last)

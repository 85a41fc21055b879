"""From a file to its findings."""

import ast
import re
from collections.abc import Collection

from bigbatch_lint.entry import find
from bigbatch_lint.finding import Finding
from bigbatch_lint.noqa import read_noqa
from bigbatch_lint.rules import RULES, Hit
from bigbatch_lint.source import Source

_GRADIENTS = ("backward", "_grad", "training_step", "compute_loss")
_STEPS = ("zero_grad", "step(", "Accumulator", "def training_step", "def compute_loss", "clear_grad")
_CLOSED = re.compile(r":\s*(#.*)?$")  # the end of a head


def check(source: Source, chosen: Collection[str] = frozenset(RULES)) -> list[Finding]:
    """Return what the chosen rules find in a file, sorted, without what its comments silence."""
    if not _may_train(source.text):
        return []
    findings = {_finding(source, code, hit) for code, hit in find(source.tree) if code in chosen}
    return sorted(_not_silenced(source, findings))


def _may_train(text: str) -> bool:
    """Tell whether a file may hold a training loop; one that does not is parsed, but not run."""
    return any(word in text for word in _GRADIENTS) and any(word in text for word in _STEPS)


def _finding(source: Source, code: str, hit: Hit) -> Finding:
    rule = RULES[code]
    first, column = getattr(hit.node, "lineno", 1), getattr(hit.node, "col_offset", 0) + 1
    last = _last_line(source, hit.node)
    cell, line = source.place(first)
    end = line + last - first
    return Finding(source.path, cell, line, column, code, rule.slug, rule.severity, hit.message, rule.remedy, end)


def _last_line(source: Source, node: ast.AST) -> int:
    """Return where a statement ends; of one that holds others, its head."""
    first: int = getattr(node, "lineno", 1)
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return getattr(node, "end_lineno", None) or first
    head = getattr(node, "test", None) or getattr(node, "iter", None) or ast.Pass()
    last: int = getattr(head, "end_lineno", None) or first
    lines = source.text.split("\n")[last - 1 : body[0].lineno - 1] if body else []
    # `):` may stand on a line of its own.
    return next((last + more for more, line in enumerate(lines) if _CLOSED.search(line)), last)


def _not_silenced(source: Source, findings: set[Finding]) -> list[Finding]:
    if not findings:
        return []
    silenced = read_noqa(source.text)
    kept = []
    for finding in findings:
        offset = source.first_line(finding.cell) - 1
        if not silenced.silences(finding.code, finding.line + offset, finding.end_line + offset):
            kept.append(finding)
    return kept

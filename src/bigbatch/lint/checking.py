"""From a file to its findings."""

import ast
import re
from collections.abc import Collection

from bigbatch.lint.finding import Finding
from bigbatch.lint.loops.assembling import training_loops
from bigbatch.lint.noqa import read_noqa
from bigbatch.lint.reading.program import Program, survey
from bigbatch.lint.reading.roots import read_program
from bigbatch.lint.rules import RULES
from bigbatch.lint.rules.rule import Hit, Rule, Script
from bigbatch.lint.sources import Source

_GRADIENTS = ("backward", "_grad", "training_step", "compute_loss")
_CLOSED = re.compile(r":\s*(#.*)?$")  # the end of a head
_STEPS = ("zero_grad", "step(", "Accumulator", "def training_step", "def compute_loss", "clear_grad")


def check(source: Source, chosen: Collection[str] = frozenset(RULES)) -> list[Finding]:
    """Return what the chosen rules find in a file, sorted, without what its comments silence."""
    hits = [(RULES[code], hit) for code, hit in _hits(source, chosen)]
    return sorted(_not_silenced(source, {_finding(source, rule, hit) for rule, hit in hits}))


def _may_train(text: str) -> bool:
    """Tell whether a file may hold a training loop; one that does not is parsed, but not read."""
    return any(word in text for word in _GRADIENTS) and any(word in text for word in _STEPS)


def read_script(tree: ast.Module) -> Script:
    """Return a file as the rules see it."""
    program = survey(tree)
    if _is_of_another_library(program):
        return Script(program, ())
    return Script(program, tuple(loop for story in read_program(program) for loop in training_loops(story)))


def _is_of_another_library(program: Program) -> bool:
    """Tell whether the same words mean something else here."""
    roots = {name.partition(".")[0] for name in program.imports.values()}
    return bool(roots & {"paddle", "tensorflow", "jax", "mindspore", "mxnet", "tinygrad"}) and "torch" not in roots


def _hits(source: Source, chosen: Collection[str]) -> list[tuple[str, Hit]]:
    if not _may_train(source.text):
        return []
    script = read_script(source.tree)
    return [(code, hit) for code in chosen for hit in RULES[code].check(script)]


def _finding(source: Source, rule: Rule, hit: Hit) -> Finding:
    first, column = getattr(hit.node, "lineno", 1), getattr(hit.node, "col_offset", 0) + 1
    last = _last_line(source, hit.node)
    cell, line = source.place(first)
    return Finding(
        source.path,
        cell,
        line,
        column,
        rule.code,
        rule.slug,
        rule.severity,
        hit.message,
        rule.remedy,
        line + last - first,
    )


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
    silenced = read_noqa(source.text) if findings else None
    if silenced is None:
        return []
    kept = []
    for finding in findings:
        offset = _line_of(source, finding) - finding.line
        if not silenced.silences(finding.code, finding.line + offset, finding.end_line + offset):
            kept.append(finding)
    return kept


def _line_of(source: Source, finding: Finding) -> int:
    """Return a finding's line in the text that was parsed."""
    if source.notebook is None:
        return finding.line
    cell = next(cell for cell in source.notebook.cells if cell.number == finding.cell)
    return cell.first_line + finding.line - 1

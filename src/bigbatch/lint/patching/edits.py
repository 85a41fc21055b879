"""Changes to a text, by the syntax nodes they are about."""

import ast
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """A piece of text, from one place to another, and what stands there instead."""

    start: int
    end: int
    rank: int = 1  # of two at the same place, the lower one comes first
    text: str = ""


class Text:
    """A module's text, with the places of its syntax nodes."""

    def __init__(self, text: str) -> None:
        """Note where each line begins: syntax nodes count lines, and columns in bytes of UTF-8."""
        self.text = text
        self.lines = text.split("\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def offset(self, line: int, column: int) -> int:
        """Return the place of a line and a column in bytes."""
        begin = self.lines[line - 1]
        return self._starts[line - 1] + len(begin.encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends."""
        end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self.offset(node.lineno, node.col_offset), self.offset(*end)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return a node as it is written."""
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, node: ast.stmt) -> str:
        """Return what stands before a statement."""
        return self.lines[node.lineno - 1][: len(self.lines[node.lineno - 1].encode()[: node.col_offset].decode())]

    def is_alone(self, node: ast.stmt) -> bool:
        """Tell whether a statement has its lines for itself, but for a comment."""
        start, end = self.span(node)
        before = self.text[self._starts[node.lineno - 1] : start]
        after = self.text[end : self._starts[(node.end_lineno or node.lineno)] - 1].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def without(self, node: ast.stmt) -> Edit:
        """Take a statement's lines out."""
        return Edit(self._starts[node.lineno - 1], self._starts[(node.end_lineno or node.lineno)])

    def instead(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """Write something else for a node."""
        return Edit(*self.span(node), text=text)

    def above(self, node: ast.stmt, line: str, rank: int = 1) -> Edit:
        """Put a line above a statement."""
        start = self._starts[node.lineno - 1]
        return Edit(start, start, rank, f"{line}\n")

    def below(self, node: ast.stmt, line: str) -> Edit:
        """Put a line below a statement."""
        start = self._starts[(node.end_lineno or node.lineno)]
        start = min(start, len(self.text))
        return Edit(start, start, 0, f"{line}\n" if self.text[start - 1 : start] == "\n" else f"\n{line}")

    def after(self, edits: list[Edit]) -> str | None:
        """Return the text with all changes made; None if two of them are about the same place."""
        result, place = [], 0
        for edit in sorted(set(edits)):
            if edit.start < place:
                return None
            result += [self.text[place : edit.start], edit.text]
            place = edit.end
        return "".join([*result, self.text[place:]])

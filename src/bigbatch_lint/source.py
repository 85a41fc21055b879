"""A file as text and syntax tree, or the reason why it cannot be read."""

import ast
import codecs
import io
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from bigbatch_lint.notebooks import BadNotebook, Notebook, read_notebook


@dataclass(frozen=True)
class Unreadable:
    """Why a file, or one cell of a notebook, is not looked at."""

    line: int
    column: int
    why: str


@dataclass(frozen=True)
class Source:
    """A file: its text as Python, its tree, and where its lines are."""

    path: str
    text: str  # of a notebook: the joined code
    tree: ast.Module
    notebook: Notebook | None
    unreadable: tuple[Unreadable, ...]

    def place(self, line: int) -> tuple[int, int]:
        """Return a line's cell (0 in a plain file) and its number there."""
        if self.notebook is None:
            return 0, line
        cell = self.notebook.cell_at(line)
        return cell.number, line - cell.first_line + 1

    def first_line(self, cell: int) -> int:
        """Return where a cell begins in the text; a plain file begins with line 1."""
        cells = self.notebook.cells if self.notebook is not None else ()
        return next((each.first_line for each in cells if each.number == cell), 1)

    def line(self, cell: int, number: int) -> str:
        """Return a line as it is written."""
        lines, place = self.text.split("\n"), self.first_line(cell) + number - 2
        return lines[place].strip() if place < len(lines) else ""

    def problems(self) -> list[str]:
        """Return where and why the file, or a cell of it, was not checked."""
        found = []
        for each in self.unreadable:
            cell, line = self.place(each.line)
            place = f"cell {cell}:{line}" if cell else str(line)
            found.append(f"{self.path}:{place}:{each.column}: cannot be checked: {each.why}")
        return found


def read_source(path: str, data: bytes | None = None) -> Source:
    """Read and parse a file; what cannot be read has an empty tree and says why. `data` stands in for its content."""
    if data is None and Path(path).is_fifo():
        return _unreadable(path, "", "it is a named pipe; use - for standard input")
    try:
        data = Path(path).read_bytes() if data is None else data
    except OSError as error:
        return _unreadable(path, "", error.strerror or str(error))
    text, why = _decoded(data)
    if why:
        return _unreadable(path, "", why)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return _notebook(path, text) if path.endswith(".ipynb") else _parsed(path, text, None)


def _decoded(data: bytes) -> tuple[str, str]:
    """Return text and no reason, or no text and the reason."""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0].replace("utf-8-sig", "utf-8")
        text: object = codecs.decode(data, encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError, ValueError) as error:
        return "", f"it is no text: {error}"
    if not isinstance(text, str):  # `coding: hex` and its like decode to bytes
        return "", f"it is no text: its encoding is said to be {encoding}"
    if "\0" in text:
        return "", "it holds a null byte: is it binary?"
    return text, ""


def _notebook(path: str, text: str) -> Source:
    try:
        notebook = read_notebook(text)
    except BadNotebook as error:
        return _unreadable(path, "", f"it is no notebook: {error}")
    except RecursionError:
        return _unreadable(path, "", "its JSON is nested too deeply")
    source = _parsed(path, notebook.text, notebook)
    broken = tuple(Unreadable(line, 1, why) for line, why in notebook.broken)
    return Source(path, source.text, source.tree, notebook, source.unreadable + broken)


def _parsed(path: str, text: str, notebook: Notebook | None) -> Source:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in their string is not our business
            tree = ast.parse(text)
    except SyntaxError as error:
        return _unreadable(path, text, error.msg, (error.lineno or 1, error.offset or 1), notebook)
    except RecursionError:
        return _unreadable(path, text, "it is nested too deeply", notebook=notebook)
    except (ValueError, MemoryError) as error:
        return _unreadable(path, text, str(error) or "it is nested too deeply", notebook=notebook)
    return Source(path, text, tree, notebook, ())


def _unreadable(
    path: str, text: str, why: str, at: tuple[int, int] = (1, 1), notebook: Notebook | None = None
) -> Source:
    empty = ast.Module(body=[], type_ignores=[])
    return Source(path, text, empty, notebook, (Unreadable(max(at[0], 1), max(at[1], 1), why),))

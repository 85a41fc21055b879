"""A file as text and syntax tree, or the reasons why it, or a cell of it, cannot be read.

The code cells of a notebook are joined in their order: what one defines, the next ones use. A line of IPython's own
(`%time`, `!pip`, `model?`) becomes `pass`, so that all other lines stay where they were.
"""

import ast
import io
import json
import re
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|.*\?\??\s*)$")
_ASSIGNED_MAGIC = re.compile(r"^(\s*[\w.,\s]+=)\s*[!%].*$")
# Cell magics whose body is still Python that runs here.
_PYTHON_CELLS = {"time", "timeit", "capture", "prun", "python", "python3", "python2"}


class _Unreadable(Exception):
    def __init__(self, why: str, line: int = 1, column: int = 1) -> None:
        super().__init__(why)
        self.why, self.line, self.column = why, line, column


@dataclass(frozen=True)
class Source:
    """A file: its text as Python (of a notebook: the joined code), its tree, and where its lines are."""

    path: str
    text: str
    tree: ast.Module
    cells: tuple[tuple[int, int], ...] = ()  # of a notebook: the number of each code cell, and its first line
    problems: tuple[str, ...] = ()  # where and why the file, or a cell of it, was not checked

    def place(self, line: int) -> tuple[int, int]:
        """Return a line's cell (0 in a plain file) and its number there."""
        return _place(self.cells, line)


def _place(cells: tuple[tuple[int, int], ...], line: int) -> tuple[int, int]:
    number, first = next((cell for cell in reversed(cells) if line >= cell[1]), (0, 1))
    return number, line - first + 1


def read_source(path: str, data: bytes | None = None) -> Source:
    """Read and parse a file; what cannot be read has an empty tree and says why. `data` stands in for its content."""
    text, tree = "", ast.Module(body=[], type_ignores=[])
    cells: tuple[tuple[int, int], ...] = ()
    broken: list[_Unreadable] = []
    try:
        text = _decoded(_content(path) if data is None else data)
        if path.endswith(".ipynb"):
            text, cells, broken = _joined(text)
        tree = _parsed(text)
    except _Unreadable as error:
        broken = [error, *broken]
    problems = []
    for each in broken:
        cell, line = _place(cells, each.line)
        place = f"cell {cell}:{line}" if cell else str(line)
        problems.append(f"{path}:{place}:{each.column}: cannot be checked: {each.why}")
    return Source(path, text, tree, cells, tuple(problems))


def _content(path: str) -> bytes:
    if Path(path).is_fifo():
        msg = "it is a named pipe; use - for standard input"
        raise _Unreadable(msg)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _Unreadable(error.strerror or str(error)) from error


def _decoded(data: bytes) -> str:
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, LookupError, ValueError) as error:
        msg = f"it is no text: {error}"
        raise _Unreadable(msg) from error


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in their string is not our business
            return ast.parse(text)
    except SyntaxError as error:
        raise _Unreadable(error.msg, max(error.lineno or 1, 1), max(error.offset or 1, 1)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _Unreadable(str(error) or "it is nested too deeply") from error


def _joined(text: str) -> tuple[str, tuple[tuple[int, int], ...], list[_Unreadable]]:
    """Join the code cells of a notebook's JSON; return also number and first line of each, and what is no Python."""
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"it is no notebook: no JSON: {error}"
        raise _Unreadable(msg) from error
    found = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(found, list):
        msg = "it is no notebook: no list of cells"
        raise _Unreadable(msg)
    parts: list[str] = []
    cells: list[tuple[int, int]] = []
    broken: list[_Unreadable] = []
    line = 1
    for number, cell in enumerate(found, start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        lines = cell.get("source", "")
        lines = lines if isinstance(lines, list) else [lines]
        python = "".join(each for each in lines if isinstance(each, str)).replace("\r\n", "\n").replace("\r", "\n")
        try:
            python = _as_python(python)
        except _Unreadable as error:
            broken.append(_Unreadable(error.why, line))
            python = "\n" * python.count("\n")
        parts.append(python)
        cells.append((number, line))
        line += python.count("\n") + 1
    return "\n".join(parts), tuple(cells), broken


def _as_python(code: str) -> str:
    """Return code that parses, with as many lines."""
    try:
        _parsed(code)
    except _Unreadable:
        lines = code.split("\n")
        first = [*code.split(maxsplit=1), ""][0]
        if first.startswith("%%") and first[2:] not in _PYTHON_CELLS:
            return "\n" * (len(lines) - 1)  # another language
        code = "\n".join(_ASSIGNED_MAGIC.sub(r"\1 None", _MAGIC.sub(r"\1pass", line)) for line in lines)
        _parsed(code)
    return code

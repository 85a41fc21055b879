"""A notebook's code as one module, and the way back from its lines to cells.

All code cells are joined in their order: what one defines, the next ones use. A line of IPython's own (`%time`, `!pip`,
`model?`) stands for `pass`, in a place that keeps all other lines where they were.
"""

import ast
import json
import re
import warnings
from dataclasses import dataclass

_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|.*\?\??\s*)$")
_ASSIGNED_MAGIC = re.compile(r"^(\s*[\w.,\s]+=)\s*[!%].*$")
# Cell magics whose body is still Python that runs here.
_PYTHON_CELLS = {"time", "timeit", "capture", "prun", "python", "python3", "python2"}


class BadNotebook(Exception):
    """A notebook that is no JSON, or no notebook."""


@dataclass(frozen=True)
class Cell:
    """One code cell: its number among all cells, from 1, and its first line in the joined text, from 1."""

    number: int
    first_line: int


@dataclass(frozen=True)
class Notebook:
    """The joined text, its cells, and the first line of each cell that is no Python."""

    text: str
    cells: tuple[Cell, ...]
    broken: tuple[tuple[int, str], ...] = ()  # first line, why

    def cell_at(self, line: int) -> Cell:
        """Return the cell that a line of the joined text belongs to."""
        return next((cell for cell in reversed(self.cells) if line >= cell.first_line), self.cells[0])


def read_notebook(text: str) -> Notebook:
    """Join the code cells of a notebook's JSON."""
    parts: list[str] = []
    cells: list[Cell] = []
    broken: list[tuple[int, str]] = []
    line = 1
    for number, code in _code_cells(text):
        python, why = _as_python(code)
        if why:
            broken.append((line, why))
        count = python.count("\n") + 1
        parts.append(python)
        cells.append(Cell(number, line))
        line += count
    return Notebook("\n".join(parts), tuple(cells) or (Cell(1, 1),), tuple(broken))


def _code_cells(text: str) -> list[tuple[int, str]]:
    """Return number and source of each code cell."""
    try:
        notebook = json.loads(text)
    except ValueError as error:
        msg = f"no JSON: {error}"
        raise BadNotebook(msg) from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        msg = "no list of cells"
        raise BadNotebook(msg)
    return [
        (number, _source(cell))
        for number, cell in enumerate(cells, start=1)
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]


def _source(cell: dict[str, object]) -> str:
    """Return a cell's text, which is one string or a list of lines."""
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source.replace("\r\n", "\n").replace("\r", "\n") if isinstance(source, str) else ""


def _as_python(code: str) -> tuple[str, str]:
    """Return code that parses, with as many lines, and why it does not if even that fails."""
    if _error(code) is None:
        return code, ""
    lines = code.split("\n")
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%") and first[2:].split(" ")[0] not in _PYTHON_CELLS:
        return "\n" * (len(lines) - 1), ""  # another language
    plain = "\n".join(_ASSIGNED_MAGIC.sub(r"\1 None", _MAGIC.sub(r"\1pass", line)) for line in lines)
    error = _error(plain)
    return (plain, "") if error is None else ("\n" * (len(lines) - 1), error)


def _error(code: str) -> str | None:
    """Say why a cell does not parse, None if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        return error.msg
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None

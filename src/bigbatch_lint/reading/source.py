"""A file as text and syntax tree, or why it, or a cell of it, cannot be read; and what its comments silence.

The code cells of a notebook are joined in their order: what one defines, the next ones use. A line of IPython's own
(`%time`, `!pip`, `model?`) becomes `pass`, so that all other lines stay where they were.
"""

import ast
import io
import json
import re
import tokenize
import warnings
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|.*\?\??\s*)$")
_ASSIGNED_MAGIC = re.compile(r"^(\s*[\w.,\s]+=)\s*[!%].*$")
# Cell magics whose body is still Python that runs here.
_PYTHON_CELLS = {"time", "timeit", "capture", "prun", "python", "python3", "python2"}
_NOQA = re.compile(
    r"#\s*(?P<whole>bigbatch\s*:\s*)?noqa\b(?:\s*:\s*(?P<codes>[A-Z]+[0-9]*(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE
)


@dataclass
class Source:
    """A file: its text as Python (of a notebook: the joined code), its tree, and where its lines are."""

    path: str
    text: str
    tree: ast.Module
    cells: list[tuple[int, int]]  # of a notebook: the number of each code cell, and its first line
    problems: tuple[str, ...] = ()  # where and why the file, or a cell of it, was not checked

    def place(self, line: int) -> tuple[int, int]:
        """Return a line's cell (0 in a plain file) and its number there."""
        number, first = next((cell for cell in reversed(self.cells) if line >= cell[1]), (0, 1))
        return number, line - first + 1


def read_source(path: str, data: bytes | None = None) -> Source:
    """Read and parse a file; what cannot be read has an empty tree and says why. `data` stands in for its content."""
    source = Source(path, "", ast.Module(body=[], type_ignores=[]), [])
    broken: list[SyntaxError] = []
    try:
        source.text = _decoded(path, data)
        if path.endswith(".ipynb"):
            source.text, source.cells = _joined(source.text, broken)
        source.tree = _parsed(source.text)
    except SyntaxError as error:
        broken.insert(0, error)
    for each in broken:
        cell, line = source.place(max(each.lineno or 1, 1))
        place = f"cell {cell}:{line}" if cell else str(line)
        source.problems += (f"{path}:{place}:{max(each.offset or 1, 1)}: cannot be checked: {each.msg}",)
    return source


def _decoded(path: str, data: bytes | None) -> str:
    try:
        if data is None and Path(path).is_fifo():
            raise SyntaxError("it is a named pipe; use - for standard input")
        data = Path(path).read_bytes() if data is None else data
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except OSError as error:
        raise SyntaxError(error.strerror or str(error)) from error
    except (LookupError, ValueError) as error:
        raise SyntaxError(f"it is no text: {error}") from error


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in their string is not our business
            return ast.parse(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "it is nested too deeply") from error


def _joined(text: str, broken: list[SyntaxError]) -> tuple[str, list[tuple[int, int]]]:
    """Join the code cells of a notebook's JSON; return also number and first line of each. Add what is no Python."""
    try:
        found = [*json.loads(text)["cells"]]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise SyntaxError(f"it is no notebook: no JSON with a list of cells: {error}") from error
    cells: list[tuple[int, int]] = []
    joined: list[str] = []
    for number, cell in enumerate(found, start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        lines = cell.get("source", "")
        given = [each for each in (lines if isinstance(lines, list) else [lines]) if isinstance(each, str)]
        code = "".join(given).replace("\r\n", "\n").replace("\r", "\n")
        cells.append((number, len(joined) + 1))
        try:
            joined += _as_python(code).split("\n")
        except SyntaxError as error:
            error.lineno = len(joined) + (error.lineno or 1)
            broken.append(error)
            joined += [""] * (code.count("\n") + 1)
    return "\n".join(joined), cells


def _as_python(code: str) -> str:
    """Return code that parses, with as many lines."""
    with suppress(SyntaxError):
        _parsed(code)
        return code
    lines = code.split("\n")
    first = [*code.split(maxsplit=1), ""][0]
    if first.startswith("%%") and first[2:] not in _PYTHON_CELLS:
        return "\n" * (len(lines) - 1)  # another language
    code = "\n".join(_ASSIGNED_MAGIC.sub(r"\1 None", _MAGIC.sub(r"\1pass", line)) for line in lines)
    _parsed(code)
    return code


def read_noqa(text: str) -> dict[int, tuple[str, ...]]:
    """Return the beginnings of codes that comments silence, by line; 0 is the whole file. An empty one fits all.

    `# noqa` after code silences its line, `# noqa: BB201,BB2` some rules; `# bigbatch: noqa` does so in the file.
    """
    silenced: dict[int, tuple[str, ...]] = defaultdict(tuple)
    # Strings that look like a comment are none, and the tokens end where the text is no Python.
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(text).readline) if "noqa" in text.lower() else ():
            found = _NOQA.search(token.string) if token.type == tokenize.COMMENT else None
            if found and (found["whole"] or not token.line.lstrip().startswith("#")):
                codes = re.split(r"[\s,]+", found["codes"].upper()) if found["codes"] else [""]
                silenced[0 if found["whole"] else token.start[0]] += tuple(codes)
    return silenced

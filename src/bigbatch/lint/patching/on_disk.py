"""Changed code back in its file: line ends as they were, a notebook's cells in its JSON."""

import json
from dataclasses import replace
from typing import Any

from bigbatch.lint.notebooks import Notebook
from bigbatch.lint.patching.arguments import NotSimple
from bigbatch.lint.patching.edits import Edit, Text
from bigbatch.lint.sources import Source


def on_disk(source: Source, raw: str, text: Text, edits: list[Edit]) -> str:
    """Return what the file holds after the changes."""
    if source.notebook is not None:
        return _notebook(source.notebook, raw, text, edits)
    after = text.after(edits)
    if after is None:
        raise NotSimple("two of its loops would be changed at the same place")
    after = after.replace("\n", "\r\n") if "\r\n" in raw else after
    return "\ufeff" + after if raw.startswith("\ufeff") else after


def _notebook(notebook: Notebook, raw: str, text: Text, edits: list[Edit]) -> str:
    """Change the cells that the changes are in, if the rest of the JSON can be written as it was."""
    data = json.loads(raw)
    if _written(data, raw) != raw:
        raise NotSimple("its JSON is not laid out as Jupyter writes it")
    for cell in notebook.cells:
        start, end = text.offset(cell.first_line, 0), text.offset(cell.first_line + cell.lines - 1, 0)
        end += len(text.lines[cell.first_line + cell.lines - 2])
        own = [replace(e, start=e.start - start, end=e.end - start) for e in edits if start <= e.start <= end]
        if own:
            _change(data["cells"][cell.number - 1], text.text[start:end], own)
    return _written(data, raw)


def _change(cell: dict[str, Any], code: str, edits: list[Edit]) -> None:
    source = cell["source"]
    whole = "".join(source) if isinstance(source, list) else source
    if whole != code:
        raise NotSimple("the cell holds lines that are not Python")
    end = len(code)
    # The line end behind a cell's last line is not the cell's.
    after = Text(code).after([replace(edit, end=min(edit.end, end)) for edit in edits])
    if after is None:
        raise NotSimple("two of its loops would be changed at the same place")
    after = after.rstrip("\n")
    cell["source"] = after.splitlines(keepends=True) if isinstance(source, list) else after


def _written(data: object, raw: str) -> str:
    """Write JSON as Jupyter does, or with the indentation that the file has."""
    second = raw.split("\n", 2)[1] if "\n" in raw else ""
    indent = len(second) - len(second.lstrip()) or None
    plain = raw.isascii() and "\\u" in raw
    return json.dumps(data, indent=indent, ensure_ascii=plain) + ("\n" if raw.endswith("\n") else "")

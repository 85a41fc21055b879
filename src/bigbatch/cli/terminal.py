"""What the commands share of the terminal: results on stdout, everything else on stderr, lines that fit."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import category

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

READABLE = 100
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode's categories


def results() -> Console:
    """Return where results go. Made per command: streams and NO_COLOR may differ between two calls in one process."""
    return Console(highlight=False)


def escaped(text: str) -> str:
    """Escape what moves a cursor, sets a title or turns a line round: names and lines may hold anything."""
    return "".join(c if c == "\t" or category(c) not in _UNSEEN else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, width: int) -> str:
    """Wrap lines; code keeps its indentation, and words stay whole, since paths are to be copied."""
    rows: list[str] = []
    for line in map(escaped, text.split("\n")):
        indent = line[: len(line) - len(line.lstrip())]
        following = f"{indent}    " if indent else ""
        rows += textwrap.wrap(
            line, min(width, READABLE), subsequent_indent=following, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(rows)


def paragraph(console: Console, text: str) -> None:
    """Print prose, without the trailing spaces that rich leaves."""
    console.print(wrapped(text, console.width), markup=False, soft_wrap=True)


def next_step(console: Console, arguments: str, why: str) -> None:
    """Print the next thing worth typing, whole on its line, as the last of a report."""
    command = f"Next: {escaped(typed(arguments))}"
    fits = len(command) + len(why) + len("  ()") <= min(console.width, READABLE)
    console.print(f"{command}  ({why})" if fits else command, markup=False, soft_wrap=True)
    if not fits:
        paragraph(console, f"({why})")


def typed(arguments: str) -> str:
    """Return a command as it can be typed: under `make`, the environment is not active and needs its path."""
    started = Path(sys.argv[0])
    if started.name == "bigbatch" and shutil.which("bigbatch") is None:
        return f"{started} {arguments}"
    return f"bigbatch {arguments}"


def print_json(data: Any) -> None:
    """Print one object; JSON has no NaN and no infinity, so a number that is neither is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    typer.echo(json.dumps(plain(data), indent=2))


@contextmanager
def hidden(bar: Progress) -> Iterator[None]:
    """Take a bar away while a line is printed where it stands: stdout and stderr may be one terminal."""
    bar.stop()
    yield
    bar.start()


def progress() -> Progress:
    """Return a bar on stderr that leaves nothing behind; there is none where stderr is no terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

"""What the commands share of the terminal: results on stdout, everything else on stderr, errors as short text."""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FAILED, MISUSED = 1, 2
READABLE = 100


def results() -> Console:
    """Where results go. Made per command: streams and NO_COLOR may differ between two calls in one process."""
    return Console(highlight=False)


def paragraph(console: Console, text: str) -> None:
    """Prose, wrapped to a width that reads well, without the trailing spaces that rich leaves."""
    console.print(textwrap.fill(text, min(console.width, READABLE)), markup=False, soft_wrap=True)


def progress() -> Progress:
    """A bar on stderr that leaves nothing behind, and is not there where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def fail(message: str, hint: str | None = None, code: int = MISUSED) -> NoReturn:
    """Say what is wrong and what to do instead, and end."""
    sys.stderr.write(f"error: {message}\n")
    if hint:
        sys.stderr.write(f"\nhint: {hint}\n")
    raise typer.Exit(code)


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Show the library's own errors without a traceback; others are bugs, here or in a user's file, and keep theirs."""
    from bigbatch.errors import BigBatchError, ConfigurationError

    try:
        yield
    except BigBatchError as error:
        message, _, hint = str(error).partition("\n\n")
        fail(message, hint, MISUSED if isinstance(error, ConfigurationError) else FAILED)

"""What the commands share: results on stdout, everything else on stderr, errors as `error:` and `hint:`."""

import json
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import count, dropwhile
from pathlib import Path
from traceback import StackSummary, TracebackException
from typing import Annotated, Any, NoReturn, TypeAlias

import typer

FAILED, MISUSED = 1, 2
_READABLE = 100
_OURS = str(Path(__file__).parent.parent)

# Options that several commands have.
File: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE.py", help="A file with setup().", exists=True, dir_okay=False)
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Html: TypeAlias = Annotated[Path | None, typer.Option("--html", metavar="PAGE", help="Write a page with plots, too.")]


def wrapped(text: str) -> str:
    """Wrap prose to the terminal; tables and code, which have two spaces somewhere, stay as they are."""
    width = min(shutil.get_terminal_size().columns, _READABLE)
    fill = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(line if "  " in line else fill(line) for line in text.split("\n"))


def show(text: str) -> None:
    """Print a result."""
    _say("")
    typer.echo(wrapped(text))


def show_json(data: Any) -> None:
    """Print one object; JSON has no NaN and no infinity, so a number that is neither is null."""
    plain = json.loads(json.dumps(data), parse_constant=lambda _: None)
    typer.echo(json.dumps(plain, indent=2))


def answer(data: dict[str, Any], text: str, page: str, *, as_json: bool, html: Path | None) -> None:
    """Print a result as text or as JSON, and write the page of `--html`."""
    if as_json:
        show_json(data)
    else:
        show(text)
    if html is not None:
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            fail(f"--html {html}: this could not be written ({error.strerror or error}).", "Name another file.", FAILED)
        _say(f"Wrote {html}\n")


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[str], None]]:
    """Yield what shows the next step in one line on stderr, where that is a terminal; it leaves nothing behind."""
    steps = count(1)

    def advance(text: str) -> None:
        if sys.stderr.isatty():
            _say(f"{next(steps)}{f' of {total}' if total else ''}: {text}")

    try:
        yield advance
    finally:
        _say("")


def _say(text: str) -> None:
    """Write to stderr, in place of the line of progress."""
    sys.stderr.write(("\r\x1b[K" if sys.stderr.isatty() else "") + text)
    sys.stderr.flush()


def fail(message: str, hint: str = "", code: int = MISUSED) -> NoReturn:
    """Say what is wrong and what to do instead, and end."""
    _say(wrapped(f"error: {message}" + (f"\n\nhint: {hint}" if hint else "")) + "\n")
    raise typer.Exit(code)


@contextmanager
def running(*, as_json: bool = False, page: Path | None = None) -> Iterator[None]:
    """Run a user's code: errors and warnings are text, and with `as_json` its prints do not mix with the results."""
    from bigbatch.errors import BigBatchError, ConfigurationError
    from bigbatch.setup import UserCodeError

    with warnings.catch_warnings(), redirect_stdout(sys.stderr) if as_json else nullcontext():
        warnings.showwarning = lambda message, *_, **__: _say(wrapped(f"warning: {message}") + "\n")
        try:
            if page is not None and (page.is_dir() or not page.parent.is_dir()):
                raise ConfigurationError(f"--html {page}: name a file in a folder that exists.", fix="--html page.html")
            yield
        except BigBatchError as error:
            message, _, hint = str(error).partition("\n")
            fail(message, hint.removeprefix("Use: "), MISUSED if isinstance(error, ConfigurationError) else FAILED)
        except UserCodeError as error:
            _say(_users_traceback(error.__cause__ or error) + "\n")
            fail(str(error), code=FAILED)


def _users_traceback(error: BaseException) -> str:
    """Return an exception as Python shows it, from the first line of the user's own on."""
    shown = TracebackException.from_exception(error)
    frames = dropwhile(lambda frame: frame.filename.startswith(("<", _OURS)), shown.stack)
    shown.stack = StackSummary.from_list(list(frames))
    return "".join(shown.format())

"""What went wrong, in one style: `error:` what happened, a blank line, `hint:` what to type instead.

An exception of a user's own code is shown as Python shows it, from the user's first line on, with a line below that
says what was being called.
"""

import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from typing import Any, NoReturn

import typer
from rich.console import Console

from bigbatch.cli.terminal import escaped, wrapped

FAILED, MISUSED = 1, 2
_OURS = Path(__file__).parent.parent
_PYTHONS = Path(sysconfig.get_path("stdlib"))
_EXIT = 'It ended the program. Put what is not to run here under  if __name__ == "__main__":'


def fail(message: str, hint: str = "", code: int = MISUSED) -> NoReturn:
    """Say what is wrong and what to do instead, and end."""
    _say(f"error: {message}")
    if hint:
        sys.stderr.write("\n")
        _say(f"hint: {hint}")
    raise typer.Exit(code)


def _say(text: str) -> None:
    sys.stderr.write(wrapped(text, Console(stderr=True).width) + "\n")


@contextmanager
def running(*, as_json: bool = False, page: Path | None = None) -> Iterator[None]:
    """Run a user's code: errors and warnings are text, and with `as_json` its prints do not mix with the results."""
    from bigbatch.errors import BigBatchError, ConfigurationError
    from bigbatch.recipes.user_code import UserCodeError

    with warnings.catch_warnings(), redirect_stdout(sys.stderr) if as_json else nullcontext():
        warnings.showwarning = _warn  # type: ignore[assignment]
        try:
            if page is not None:
                from bigbatch.report.plots import check_page

                check_page(page)
            yield
        except BigBatchError as error:
            message, _, hint = str(error).partition("\n")
            frames = [frame for frame in extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
            where = f"{_place(frames[-1])}: " if frames else ""
            code = MISUSED if isinstance(error, ConfigurationError) else FAILED
            fail(where + message, hint.removeprefix("Use: ").strip("\n"), code)
        except UserCodeError as error:
            _fail_in_their_code(error)


@contextmanager
def usage_errors_as_text() -> Iterator[None]:
    """Show what typer says of a command line that it cannot read; its exceptions have no public name to catch."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "bigbatch")
        fail(error.format_message(), f"`{command} --help` shows what there is.")


def write_page(text: str, page: Path) -> None:
    """Write the page of `--html`, and say so where it does not mix with results."""
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--html {page}: this could not be written ({error.strerror or error}).", "Name another file.", FAILED)
    typer.echo(f"Wrote {escaped(str(page))}", err=True)


def _fail_in_their_code(error: Exception) -> NoReturn:
    """Show the traceback of what a user's code raised, then what was being called, and where it broke."""
    cause = error.__cause__ or error
    shown = TracebackException.from_exception(cause)
    left_out = _keep_theirs(shown)
    sys.stderr.write("".join(shown.format() if shown.stack else shown.format_exception_only()) + "\n")
    places = [_place(frame) for frame in shown.stack if _is_theirs(frame.filename)][-1:]
    if isinstance(cause, SyntaxError) and cause.filename:
        places = [f"{Path(cause.filename).name}, line {cause.lineno}"]
    if left_out:
        places.append(f"{left_out} call{'s' if left_out > 1 else ''} inside libraries not shown")
    where = f" ({'; '.join(places)})" if places else ""
    fail(f"{error}{where}", _EXIT if isinstance(cause, SystemExit) else "", FAILED)


def _keep_theirs(shown: TracebackException) -> int:
    """Keep the user's own frames and the one that raised, here and in what it came from; returns how many others."""
    frames = [frame for frame in shown.stack if not _is_ours(frame.filename)]
    first = next((place for place, frame in enumerate(frames) if _is_theirs(frame.filename)), len(frames) - 1)
    after = frames[max(first, 0) :]
    kept = [frame for frame in after if _is_theirs(frame.filename) or frame is after[-1]]
    shown.stack = StackSummary.from_list(kept)
    for before in (shown.__cause__, shown.__context__):
        if before is not None:
            _keep_theirs(before)
    return len(after) - len(kept)


def _is_ours(name: str) -> bool:
    """Tell frames that say nothing to a user: this library's, and those that Python makes up."""
    return name.startswith("<") or Path(name).is_relative_to(_OURS)


def _is_theirs(name: str) -> bool:
    """Tell a user's own code from this library's, Python's and whatever was installed."""
    path = Path(name)
    return not (_is_ours(name) or path.is_relative_to(_PYTHONS) or {"site-packages", "dist-packages"} & set(path.parts))


def _place(frame: FrameSummary) -> str:
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def _warn(message: Warning | str, _: type[Warning], filename: str, lineno: int, *__: Any) -> None:
    """Show a warning as text; its place only where that is the user's."""
    where = f"{Path(filename).name}, line {lineno}: " if _is_theirs(filename) else ""
    _say(f"warning: {where}{message}")

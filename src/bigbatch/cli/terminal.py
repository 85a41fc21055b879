"""What the commands share: results on stdout, everything else on stderr, and what went wrong in one style.

`error:` what happened, a blank line, `hint:` what to type instead. An exception of a user's own code is shown as Python
shows it, from the user's first line on, with a line below that says what was being called.
"""

import json
import math
import shutil
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from typing import Annotated, Any, NoReturn, TypeAlias
from unicodedata import category

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FAILED, MISUSED = 1, 2
READABLE = 100
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode's categories
_OURS = Path(__file__).parent.parent
_PYTHONS = Path(sysconfig.get_path("stdlib"))
_EXIT = 'It ended the program. Put what is not to run here under  if __name__ == "__main__":'

# Options that several commands have.
File: TypeAlias = Annotated[Path, typer.Argument(metavar="FILE.py", help="A file with setup().")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option("--html", metavar="PAGE", help="Write a page with plots, too; needs matplotlib.")
]


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


class Results(Console):
    """Where results go. Made per command: streams and NO_COLOR may differ between two calls in one process."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def plain(self, text: str) -> None:
        """Print text as it is, whole on its line."""
        self.print(text, markup=False, soft_wrap=True)

    def paragraph(self, text: str) -> None:
        """Print prose, without the trailing spaces that rich leaves."""
        self.plain(wrapped(text, self.width))

    def next_step(self, arguments: str, why: str) -> None:
        """Print the next thing worth typing, whole on its line, as the last of a report."""
        command = f"Next: {escaped(typed(arguments))}"
        fits = len(command) + len(why) + len("  ()") <= min(self.width, READABLE)
        self.plain(f"{command}  ({why})" if fits else command)
        if not fits:
            self.paragraph(f"({why})")


def typed(arguments: str) -> str:
    """Return a command as it can be typed: under `make`, the environment is not active and needs its path."""
    started = Path(sys.argv[0])
    return f"{started if started.name == 'bigbatch' and shutil.which('bigbatch') is None else 'bigbatch'} {arguments}"


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
def progress(what: str, total: int | None) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Show a bar on stderr that leaves nothing behind; yield it, and what takes a step of it and describes the next.

    There is none where stderr is no terminal.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escaped(what), total=total)
        yield bar, lambda text: bar.update(task, advance=1, description=text)


def deliver(
    file: Path, data: dict[str, Any] | None, show: Callable[[Results], None], page: Callable[[], str], to: Path | None
) -> None:
    """Print what was found of a file, as JSON where there is `data` for it; write the page of `--html`, and say so."""
    if data is None:
        show(Results())
    else:
        print_json({"file": str(file), **data})
    if to is None:
        return
    try:
        to.write_text(page(), encoding="utf-8")
    except OSError as error:
        fail(f"--html {to}: this could not be written ({error.strerror or error}).", "Name another file.", FAILED)
    typer.echo(f"Wrote {escaped(str(to))}", err=True)


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
    from bigbatch.setup import UserCodeError

    with warnings.catch_warnings(), redirect_stdout(sys.stderr) if as_json else nullcontext():
        warnings.showwarning = _warn  # type: ignore[assignment]
        try:
            if page is not None:
                from bigbatch.report.page import check_page

                check_page(page)
            yield
        except BigBatchError as error:
            message, _, hint = str(error).partition("\n")
            theirs = [_place(frame) for frame in extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
            code = MISUSED if isinstance(error, ConfigurationError) else FAILED
            fail(": ".join([*theirs[-1:], message]), hint.removeprefix("Use: ").strip("\n"), code)
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


def _fail_in_their_code(error: Exception) -> NoReturn:
    """Show the traceback of what a user's code raised, then what was being called, and where it broke."""
    cause = error.__cause__ or error
    shown = TracebackException.from_exception(cause)
    for each in (shown, shown.__cause__, shown.__context__):
        if each is not None:
            # The user's own frames, and the one that raised.
            frames = [frame for frame in each.stack if not _is_ours(frame.filename)]
            each.stack = StackSummary.from_list([f for f in frames if _is_theirs(f.filename) or f is frames[-1]])
    sys.stderr.write("".join(shown.format() if shown.stack else shown.format_exception_only()) + "\n")
    places = [_place(frame) for frame in shown.stack if _is_theirs(frame.filename)][-1:]
    if isinstance(cause, SyntaxError) and cause.filename:
        places = [f"{Path(cause.filename).name}, line {cause.lineno}"]
    where = f" ({places[0]})" if places else ""
    fail(f"{error}{where}", _EXIT if isinstance(cause, SystemExit) else "", FAILED)


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

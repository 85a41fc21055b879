"""`bigbatch lint`: read training scripts for the classic mistakes, without running them."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.failures import FAILED, MISUSED, fail
from bigbatch.cli.terminal import escaped, results

if TYPE_CHECKING:
    from bigbatch.lint.finding import Finding
    from bigbatch.lint.linting import Checked, Choice


class Format(str, Enum):
    """How findings are shown."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def lint(  # noqa: PLR0917 - typer gives them by name
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH...", help="Scripts, notebooks, folders; - for standard input.")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option(metavar="CODES", help="Only these rules: BB103,BB2 or ALL.")
    ] = None,
    extend_select: Annotated[list[str] | None, typer.Option(metavar="CODES", help="These rules too.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODES", help="Not these rules.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="PATTERNS", help="Not these files or folders.")] = None,
    force_exclude: Annotated[bool, typer.Option("--force-exclude", help="Exclude also files that are named.")] = False,
    output: Annotated[
        Format | None, typer.Option("--format", help="How to show findings.", show_default="text")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    diff: Annotated[bool, typer.Option("--diff", hidden=True)] = False,
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Print a rule's page.")] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="End with 0 even if something was found.")] = False,
    stdin_filename: Annotated[str, typer.Option(metavar="NAME", help="What standard input is called.")] = "stdin.py",
) -> None:
    """Read training scripts and notebooks for the classic mistakes of gradient accumulation.

    Nothing is imported or run. Ends with 0 if nothing was found, with 1 if something was, with 2 if it could not look.

    Settings are read from [tool.bigbatch.lint] in the nearest pyproject.toml: select, extend-select, ignore, exclude.
    """
    from bigbatch.lint.linting import Choice
    from bigbatch.lint.settings import Settings, SettingsError

    if diff:
        fail("--diff was removed", "`bigbatch lint --explain BB103` shows the fix for a finding of BB103.")
    if explain is not None:
        _explain(explain.upper())
        return
    shown = _format(output, as_json=as_json)
    choice = Choice(_codes(select), _codes(extend_select), _codes(ignore), _split(exclude), force_exclude)
    try:
        Settings().codes(choice.select, choice.extend_select, choice.ignore)  # misspelt ones, before anything is read
        checked = _checked(_existing(paths or [Path()]), choice, stdin_filename)
        with _collecting_seldom():
            found, problems = _show(checked, shown)
    except SettingsError as error:
        message, _, hint = str(error).partition("\n")
        fail(message, hint, MISUSED)
    if problems:
        raise typer.Exit(MISUSED)
    if found and not exit_zero:
        raise typer.Exit(FAILED)


def _format(output: Format | None, *, as_json: bool) -> Format:
    if as_json and output not in {None, Format.JSON}:
        fail(f"--json and --format {output.value if output else ''} ask for different things", "Leave one of them out.")
    return Format.JSON if as_json else output or Format.TEXT


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Look for garbage less often: a syntax tree is many small objects that are all still needed."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _split(given: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for each in given or () for part in each.split(",") if part.strip())


def _codes(given: list[str] | None) -> tuple[str, ...]:
    return tuple(code.upper() for code in _split(given))


def _existing(paths: list[Path]) -> list[Path]:
    for path in paths:
        if str(path) != "-" and not path.exists():
            fail(f"there is no file or folder {path}")
    return paths


def _explain(code: str) -> None:
    from bigbatch.lint.pages import page_of
    from bigbatch.lint.rules import REMOVED, RULES

    if code in REMOVED:
        fail(f"the rule {code} was removed", REMOVED[code])
    page = page_of(code)
    if code not in RULES or page is None:
        fail(f"there is no rule {code}", f"The rules are {', '.join(RULES)}.")
    typer.echo(page.rstrip())


def _checked(paths: list[Path], choice: "Choice", name: str) -> "Iterator[Checked]":
    """Check one file after the other; standard input last."""
    from bigbatch.lint.linting import lint as lint_files
    from bigbatch.lint.linting import lint_text

    files = [path for path in paths if str(path) != "-"]
    yield from lint_files(files, choice)
    if len(files) < len(paths):
        yield lint_text(sys.stdin.buffer.read(), name, choice)


def _show(checked: "Iterator[Checked]", output: Format) -> tuple[int, int]:
    """Show findings as they come, and on stderr what could not be checked; return how many there were of each."""
    from bigbatch.cli import lint_report

    console = results()
    findings: list[Finding] = []
    files, problems = 0, 0
    for files, each in enumerate(checked, start=1):  # noqa: B007 - how many there were is said below
        findings += each.findings
        problems += len(each.source.problems())
        for problem in each.source.problems():
            sys.stderr.write(f"error: {escaped(problem)}\n")
        if output is Format.TEXT:
            lint_report.as_text(console, each)
        elif output is Format.GITHUB:
            for finding in each.findings:
                typer.echo(lint_report.as_github(finding))
    if output is Format.JSON:
        typer.echo(lint_report.as_json(findings))
    elif output is Format.TEXT:
        if findings or not problems:
            sys.stderr.write(f"{lint_report.summary(findings, files)}\n")
        if findings:
            sys.stderr.write(f"\nhint: `bigbatch lint --explain {findings[0].code}` says why and how to fix it.\n")
    return len(findings), problems

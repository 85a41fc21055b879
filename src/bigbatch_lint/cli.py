"""The command line: `bigbatch-lint`, and `bigbatch lint`."""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from bigbatch_lint import report
from bigbatch_lint.config import Settings, SettingsError
from bigbatch_lint.finding import Finding
from bigbatch_lint.rules import REMOVED, RULES
from bigbatch_lint.runner import Checked, Choice, lint, lint_text

FOUND, MISUSED = 1, 2
DESCRIPTION = """\
Read training scripts and notebooks for the classic mistakes of gradient accumulation.

Nothing is imported or run. Ends with 0 if nothing was found, with 1 if something was, with 2 if it could not look.

Settings are read from [tool.bigbatch.lint] in the nearest pyproject.toml: select, extend-select, ignore, exclude."""
# In an installed package the pages lie beside this file; in the repository they are part of its documentation.
_PAGES = (Path(__file__).parent / "pages", Path(__file__).parents[2] / "docs" / "lint")


class UsageError(Exception):
    """A command line that cannot be followed: what is wrong, and what to type instead."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a bad command line in the style of all other errors."""
        raise UsageError(message, f"`{self.prog} --help` shows what there is.")


def parser(program: str) -> argparse.ArgumentParser:
    """Return the options."""
    plain = argparse.RawDescriptionHelpFormatter
    options = _Parser(program, description=DESCRIPTION, formatter_class=plain, allow_abbrev=False)
    add = options.add_argument
    add("paths", nargs="*", metavar="PATH", help="Scripts, notebooks, folders; - for standard input.")
    add("--select", action="append", metavar="CODES", help="Only these rules: BB103,BB2 or ALL.")
    add("--extend-select", action="append", metavar="CODES", help="These rules too.")
    add("--ignore", action="append", metavar="CODES", help="Not these rules.")
    add("--exclude", action="append", metavar="PATTERNS", help="Not these files or folders.")
    add("--force-exclude", action="store_true", help="Exclude also files that are named.")
    add("--format", choices=("text", "json", "github"), help="How to show findings (default: text).")
    add("--json", action="store_true", help="The same as --format json.")
    add("--diff", action="store_true", help=argparse.SUPPRESS)
    add("--explain", metavar="CODE", help="Print a rule's page.")
    add("--exit-zero", action="store_true", help="End with 0 even if something was found.")
    add("--stdin-filename", metavar="NAME", default="stdin.py", help="What standard input is called.")
    return options


def main(arguments: Sequence[str] | None = None, program: str = "bigbatch-lint") -> int:
    """Run the command, and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that cannot show … gets a question mark
    try:
        return _run(parser(program).parse_args(arguments))
    except UsageError as error:
        problem, hint = error.problem, error.hint
    except SettingsError as error:
        problem, _, hint = str(error).partition("\n")
    sys.stderr.write(f"{report.wrapped(f'error: {problem}')}\n")
    if hint:
        sys.stderr.write(f"\n{report.wrapped(f'hint: {hint}')}\n")
    return MISUSED


def _run(given: argparse.Namespace) -> int:
    if given.diff:
        problem = "--diff was removed"
        raise UsageError(problem, "`bigbatch lint --explain BB103` shows the fix for a finding of BB103.")
    if given.explain is not None:
        sys.stdout.write(_page(given.explain.upper()))
        return 0
    shown = _format(given)
    choice = Choice(
        _codes(given.select),
        _codes(given.extend_select),
        _codes(given.ignore),
        _split(given.exclude),
        given.force_exclude,
    )
    Settings().codes(choice.select, choice.extend_select, choice.ignore)  # misspelt ones, before anything is read
    paths = given.paths or ["."]
    for path in paths:
        if path != "-" and not Path(path).exists():
            problem = f"there is no file or folder {path}"
            raise UsageError(problem)
    with _collecting_seldom():
        found, problems = _show(_checked(paths, choice, given.stdin_filename), shown)
    if problems:
        return MISUSED
    return FOUND if found and not given.exit_zero else 0


def _format(given: argparse.Namespace) -> str:
    if given.json and given.format not in {None, "json"}:
        problem = f"--json and --format {given.format} ask for different things"
        raise UsageError(problem, "Leave one of them out.")
    return "json" if given.json else given.format or "text"


def _page(code: str) -> str:
    """Return a rule's page as Markdown."""
    if code in REMOVED:
        problem = f"the rule {code} was removed"
        raise UsageError(problem, REMOVED[code])
    pages = [home / f"{code}.md" for home in _PAGES]
    page = next((each for each in pages if code in RULES and each.is_file()), None)
    if page is None:
        problem = f"there is no rule {code}"
        raise UsageError(problem, f"The rules are {', '.join(RULES)}.")
    return page.read_text(encoding="utf-8").rstrip() + "\n"


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage less often: a syntax tree is many small objects that are all still needed."""
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


def _checked(paths: list[str], choice: Choice, name: str) -> Iterator[Checked]:
    """Check one file after the other; standard input last."""
    files = [Path(path) for path in paths if path != "-"]
    yield from lint(files, choice)
    if len(files) < len(paths):
        yield lint_text(sys.stdin.buffer.read(), name, choice)


def _show(checked: Iterator[Checked], shown: str) -> tuple[int, int]:
    """Show findings as they come, and on stderr what could not be checked; return how many there were of each."""
    findings: list[Finding] = []
    files, problems = 0, 0
    for each in checked:
        files += 1
        findings += each.findings
        for problem in each.source.problems():
            problems += 1
            sys.stderr.write(f"error: {report.escaped(problem)}\n")
        if shown == "text":
            sys.stdout.write(report.as_text(each))
        elif shown == "github":
            sys.stdout.writelines(f"{report.as_github(finding)}\n" for finding in each.findings)
    if shown == "json":
        sys.stdout.write(f"{report.as_json(findings)}\n")
    elif shown == "text":
        if findings or not problems:
            sys.stderr.write(f"{report.summary(findings, files)}\n")
        if findings:
            sys.stderr.write(f"\nhint: `bigbatch lint --explain {findings[0].code}` says why and how to fix it.\n")
    return len(findings), problems

"""The command line: `bigbatch-lint`, and `bigbatch lint`."""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from bigbatch_lint.output.check import Checked, check_source, lint
from bigbatch_lint.output.config import Settings, UsageError, settings_of
from bigbatch_lint.output.report import Finding, as_github, as_text, escaped, summary, wrapped
from bigbatch_lint.reading.source import read_source
from bigbatch_lint.rules import REMOVED, RULES

FOUND, MISUSED = 1, 2
DESCRIPTION = """\
Read training scripts and notebooks for the classic mistakes of gradient accumulation.

Nothing is imported or run. Ends with 0 if nothing was found, with 1 if something was, with 2 if it could not look.

Settings are read from [tool.bigbatch.lint] in the nearest pyproject.toml: select, extend-select, ignore, exclude."""
# In an installed package the pages lie beside this file; in the repository they are part of its documentation.
_PAGES = (Path(__file__).parent / "pages", Path(__file__).parents[2] / "docs" / "lint")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a bad command line in the style of all other errors."""
        raise UsageError(message, f"`{self.prog} --help` shows what there is.")


def parser(program: str) -> argparse.ArgumentParser:
    """Return the options."""
    plain = argparse.RawDescriptionHelpFormatter
    options = _Parser(program, description=DESCRIPTION, formatter_class=plain, allow_abbrev=False)
    add = options.add_argument
    add("paths", nargs="*", metavar="PATH", default=["."], help="Scripts, notebooks, folders; - for standard input.")
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
        reconfigure = getattr(stream, "reconfigure", lambda **_: None)
        reconfigure(errors="replace")  # a terminal that cannot show … gets a question mark
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 50)  # a syntax tree is many small objects that are all still needed
    try:
        return _run(parser(program).parse_args(arguments))
    except UsageError as error:
        hint = f"\n{wrapped(f'hint: {error.hint}')}\n" if error.hint else ""
        sys.stderr.write(f"{wrapped(f'error: {error.problem}')}\n{hint}")
        return MISUSED
    finally:
        gc.set_threshold(*before)


def _run(given: argparse.Namespace) -> int:
    if given.diff:
        raise UsageError("--diff was removed", "`bigbatch lint --explain BB103` shows the fix for a finding of BB103.")
    if given.explain is not None:
        sys.stdout.write(page(given.explain.upper()))
        return 0
    if given.json and given.format not in {None, "json"}:
        raise UsageError(f"--json and --format {given.format} ask for different things", "Leave one of them out.")
    select, extend, ignore = (
        tuple(code.upper() for code in _split(each)) for each in (given.select, given.extend_select, given.ignore)
    )
    command = Settings(select, extend, ignore, _split(given.exclude), force_exclude=given.force_exclude)
    command.codes()  # misspelt ones, before anything is read
    for path in given.paths:
        if path != "-" and not Path(path).exists():
            raise UsageError(f"there is no file or folder {path}")
    checked = _checked(given.paths, command, given.stdin_filename)
    found, failed = _show(checked, given.format or ("json" if given.json else "text"))
    return MISUSED if failed else FOUND if found and not given.exit_zero else 0


def page(code: str) -> str:
    """Return a rule's page as Markdown."""
    if code in REMOVED:
        raise UsageError(f"the rule {code} was removed", REMOVED[code])
    if code not in RULES:
        raise UsageError(f"there is no rule {code}", f"The rules are {', '.join(RULES)}.")
    found = next(home / f"{code}.md" for home in _PAGES if (home / f"{code}.md").is_file())
    return found.read_text(encoding="utf-8").rstrip() + "\n"


def _split(given: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for each in given or () for part in each.split(",") if part.strip())


def _checked(paths: list[str], command: Settings, name: str) -> Iterator[Checked]:
    """Check one file after the other; standard input last."""
    yield from lint([Path(path) for path in paths if path != "-"], command)
    if "-" in paths:
        codes = settings_of(Path(name), {}).codes(command)
        yield check_source(read_source(name, sys.stdin.buffer.read()), codes)


def _show(checked: Iterator[Checked], shown: str) -> tuple[int, int]:
    """Show findings as they come, and on stderr what could not be checked; return how many there were of each."""
    findings: list[Finding] = []
    files, failed = 0, 0
    for found, problems in checked:
        files, failed = files + 1, failed + len(problems)
        findings += found
        sys.stderr.writelines(f"error: {escaped(problem)}\n" for problem in problems)
        if shown != "json":
            sys.stdout.writelines(map(as_github if shown == "github" else as_text, found))
    if shown == "json":
        sys.stdout.write(f"{json.dumps([finding.as_dict() for finding in findings], indent=2)}\n")
    if shown == "text" and (findings or not failed):
        sys.stderr.write(f"{summary(findings, files)}\n")
    if shown == "text" and findings:
        sys.stderr.write(f"\nhint: `bigbatch lint --explain {findings[0].code}` says why and how to fix it.\n")
    return len(findings), failed

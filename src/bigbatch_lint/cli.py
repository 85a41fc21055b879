"""The command line: `bigbatch-lint`, and `bigbatch lint`."""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bigbatch_lint.output.check import Checked, Finding, as_text, check_source, escaped, lint, summary, wrapped
from bigbatch_lint.output.config import Settings, UsageError, settings_of
from bigbatch_lint.reading.source import read_source
from bigbatch_lint.rules import RULES

FOUND, MISUSED = 1, 2
DESCRIPTION = """\
Read training scripts and notebooks for the classic mistakes of gradient accumulation.

Nothing is imported or run. Ends with 0 if nothing was found, with 1 if something was, with 2 if it could not look.

Settings are read from [tool.bigbatch.lint] in the nearest pyproject.toml: select, ignore, exclude."""
# In an installed package the pages lie beside this file; in the repository they are part of its documentation.
_PAGES = (Path(__file__).parent / "pages", Path(__file__).parents[2] / "docs" / "lint")


def parser(program: str) -> argparse.ArgumentParser:
    """Return the options."""
    plain = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(program, description=DESCRIPTION, formatter_class=plain, allow_abbrev=False)
    add = options.add_argument
    add("paths", nargs="*", metavar="PATH", default=["."], help="Scripts, notebooks, folders; - for standard input.")
    add("--select", action="append", default=[], metavar="CODES", help="Only these rules: BB103,BB2 or ALL.")
    add("--ignore", action="append", default=[], metavar="CODES", help="Not these rules.")
    add("--exclude", action="append", default=[], metavar="PATTERNS", help="Not these files or folders.")
    add("--json", action="store_true", help="Write findings as one JSON list.")
    add("--explain", metavar="CODE", help="Print a rule's page.")
    add("--exit-zero", action="store_true", help="End with 0 even if something was found.")
    add("--stdin-filename", metavar="NAME", default="stdin.py", help="What standard input is called.")
    return options


def main(arguments: Sequence[str] | None = None, program: str = "bigbatch-lint") -> int:
    """Run the command, and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")  # what cannot be shown is a question mark
    given = parser(program).parse_args(arguments)
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 50)  # a syntax tree is many small objects that are all still needed
    try:
        if given.explain is None:
            return _show(_checked(given), given)
        sys.stdout.write(page(given.explain.upper()))
    except UsageError as error:
        sys.stderr.write("\n".join(wrapped(line) for line in f"error: {error}\n".split("\n")))
        return MISUSED
    finally:
        gc.set_threshold(*before)
    return 0


def page(code: str) -> str:
    """Return a rule's page as Markdown."""
    if code not in RULES:
        raise UsageError(f"there is no rule {code}\nhint: The rules are {', '.join(RULES)}.")
    found = next(home / f"{code}.md" for home in _PAGES if (home / f"{code}.md").is_file())
    return found.read_text(encoding="utf-8").rstrip() + "\n"


def _split(given: list[str]) -> tuple[str, ...]:
    return tuple(part.strip() for each in given for part in each.split(",") if part.strip())


def _checked(given: argparse.Namespace) -> Iterator[Checked]:
    select, ignore = (_split([code.upper() for code in each]) for each in (given.select, given.ignore))
    command = Settings(select, ignore, _split(given.exclude))
    command.codes()  # misspelt ones, before anything is read
    paths = [Path(path) for path in given.paths if path != "-"]
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no file or folder {path}")
    yield from lint(paths, command)
    if "-" in given.paths:
        codes = settings_of(Path(given.stdin_filename).absolute()).codes(command)
        yield check_source(read_source(given.stdin_filename, sys.stdin.buffer.read()), codes)


def _show(checked: Iterator[Checked], given: argparse.Namespace) -> int:
    """Show findings as they come, and on stderr what could not be checked; return the exit status."""
    findings: list[Finding] = []
    files, failed = 0, 0
    for found, problems in checked:
        files, failed = files + 1, failed + len(problems)
        findings += found
        sys.stderr.writelines(f"error: {escaped(problem)}\n" for problem in problems)
        sys.stdout.writelines(map(as_text, () if given.json else found))
    if given.json:
        sys.stdout.write(f"{json.dumps([finding.as_dict() for finding in findings], indent=2)}\n")
    elif findings or not failed:
        hint = "\nhint: `bigbatch lint --explain {}` says why and how to fix it.\n"
        sys.stderr.write(f"{summary(findings, files)}\n{hint.format(findings[0].code) if findings else ''}")
    return MISUSED if failed else FOUND if findings and not given.exit_zero else 0

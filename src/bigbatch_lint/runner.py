"""From paths to findings: which files, which rules for each, what they find."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bigbatch_lint.check import check
from bigbatch_lint.config import Nearest
from bigbatch_lint.files import EXCLUDED, files_in, is_excluded
from bigbatch_lint.finding import Finding
from bigbatch_lint.source import Source, Unreadable, read_source


@dataclass(frozen=True)
class Choice:
    """What the command line says; everything else is in the files' own pyproject.toml."""

    select: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    force_exclude: bool = False  # also files that were named


@dataclass(frozen=True)
class Checked:
    """One file, and what was found in it."""

    source: Source
    findings: tuple[Finding, ...]


def lint(paths: list[Path], choice: Choice) -> Iterator[Checked]:
    """Check all files below paths, one after the other."""
    nearest = Nearest()
    named = {path for path in paths if not path.is_dir()}
    for file in files_in(paths, (*EXCLUDED, *choice.exclude)):
        settings = nearest.of(file)
        if (choice.force_exclude or file not in named) and _is_left_out(file, settings.exclude, settings.folder):
            continue
        if choice.force_exclude and file in named and _is_left_out(file, (*EXCLUDED, *choice.exclude), None):
            continue
        codes = settings.codes(choice.select, choice.extend_select, choice.ignore)
        yield check_source(read_source(str(file)), codes)


def lint_text(data: bytes, name: str, choice: Choice) -> Checked:
    """Check what was read from standard input, as if it were the content of a file of that name."""
    codes = Nearest().of(Path(name)).codes(choice.select, choice.extend_select, choice.ignore)
    return check_source(read_source(name, data), codes)


def check_source(source: Source, codes: frozenset[str]) -> Checked:
    """Check one file. A failure of the linter itself is no finding, and does not hide what is in the other files."""
    try:
        return Checked(source, tuple(check(source, codes)))
    except RecursionError:
        why = "it is nested too deeply"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other files are checked
        why = f"bigbatch lint failed on it, please report: {type(error).__name__}: {error}"
    return Checked(replace(source, unreadable=(Unreadable(1, 1, why),)), ())


def _is_left_out(file: Path, patterns: tuple[str, ...], folder: Path | None) -> bool:
    """Tell whether a pattern fits a file or a folder it is in."""
    base = folder if folder is not None else Path.cwd()
    whole = Path(os.path.realpath(file))  # Path.resolve fails on a link that leads to itself
    return any(is_excluded(each, base, patterns) for each in (whole, *whole.parents) if each != base)

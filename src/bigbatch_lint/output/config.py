"""Which rules and files: `[tool.bigbatch.lint]` in the nearest pyproject.toml, and what the command line says instead.

[tool.bigbatch.lint]
select = ["ALL"]            # codes or their beginnings; instead of the rules that are on by default
extend-select = ["BB103"]   # besides them
ignore = ["BB5"]
exclude = ["legacy", "*_old.py"]
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bigbatch_lint.rules import REMOVED, RULES

_KEYS = ("exclude", "extend-select", "ignore", "select")


class UsageError(Exception):
    """A command line or settings that cannot be used: what is wrong, and what to write instead."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem}\n{hint}")
        self.problem, self.hint = problem, hint


@dataclass(frozen=True)
class Settings:
    """What one pyproject.toml says, or the command line."""

    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    folder: Path = Path()  # where it says so
    force_exclude: bool = False  # also files that were named

    def codes(self, command: "Settings | None" = None) -> frozenset[str]:
        """Return the codes that are selected and not ignored; of two beginnings that fit, the longer one decides."""
        given = command or Settings()
        select = given.select or self.select
        extend, ignore = (*self.extend_select, *given.extend_select), (*self.ignore, *given.ignore)
        for code in (*(select or ()), *extend, *ignore):
            if code in REMOVED:
                problem = f"the rule {code} was removed."
                raise UsageError(problem, REMOVED[code])
            if code != "ALL" and not any(rule.startswith(code) for rule in RULES):
                problem = f"no rule's code begins with {code!r}."
                raise UsageError(problem, f"The rules are {', '.join(RULES)}.")
        wanted = (*(("ALL",) if select is None else select), *extend)
        return frozenset(code for code in RULES if _fit(code, wanted) > _fit(code, ignore))


def _fit(code: str, beginnings: Iterable[str]) -> int:
    """Return how much of a code its best beginning fits; -1 if none does."""
    fits = [0 if each == "ALL" else len(each) for each in beginnings if each == "ALL" or code.startswith(each)]
    return max(fits, default=-1)


def settings_of(file: Path, known: dict[Path, Settings | None]) -> Settings:
    """Return what the nearest pyproject.toml with a [tool.bigbatch.lint] says; each one is read once."""
    # Unlike Path.resolve, this takes a link that leads to itself for what it is.
    for folder in Path(os.path.realpath(file)).parents:
        if folder not in known:
            known[folder] = read_settings(folder / "pyproject.toml")
        found = known[folder]
        if found is not None:
            return found
    return Settings()


def read_settings(path: Path) -> Settings | None:
    """Return what a pyproject.toml says; None if there is none, or nothing in it."""
    if not path.is_file():
        return None
    tool = _read_toml(path).get("tool")
    ours = tool.get("bigbatch") if isinstance(tool, dict) else None
    table = ours.get("lint") if isinstance(ours, dict) else None
    if not isinstance(table, dict):
        return None
    lists: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            problem = f"{path}: [tool.bigbatch.lint] knows no {key!r}."
            raise UsageError(problem, f"It knows {', '.join(_KEYS)}.")
        if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            problem = f"{path}: {key} in [tool.bigbatch.lint] must be a list of strings; found {value!r}."
            raise UsageError(problem, f'Write  {key} = ["BB103"]')
        lists[key.replace("-", "_")] = tuple(value)
    settings = Settings(**lists, folder=path.parent)
    try:
        settings.codes()
    except UsageError as error:
        problem = f"{path}: {error.problem}"
        raise UsageError(problem, error.hint) from error
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    # Python 3.10 has no TOML reader of its own; there `tomli` is the same one.
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        data: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        problem = f"{path} cannot be read: {error}"
        raise UsageError(problem) from error
    return data

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

_KEYS = {"select", "extend-select", "ignore", "exclude"}


class SettingsError(Exception):
    """Settings that cannot be used: what was found, and after a line break what to write instead."""


@dataclass(frozen=True)
class Settings:
    """What one pyproject.toml says."""

    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    folder: Path | None = None  # where it says so

    def codes(
        self, instead: tuple[str, ...] = (), more: tuple[str, ...] = (), less: tuple[str, ...] = ()
    ) -> frozenset[str]:
        """Return the codes of the chosen rules; the arguments are --select, --extend-select and --ignore."""
        select = instead or self.select
        return chosen(select, (*self.extend_select, *more), (*self.ignore, *less))


def chosen(select: tuple[str, ...] | None, extend: tuple[str, ...], ignore: tuple[str, ...]) -> frozenset[str]:
    """Return the codes that are selected and not ignored; of two beginnings that fit, the longer one decides."""
    for code in (*(select or ()), *extend, *ignore):
        if code in REMOVED:
            msg = f"the rule {code} was removed.\n{REMOVED[code]}"
            raise SettingsError(msg)
        if code != "ALL" and not any(rule.startswith(code) for rule in RULES):
            msg = f"no rule's code begins with {code!r}.\nThe rules are {', '.join(RULES)}."
            raise SettingsError(msg)
    wanted = {code: _fit(code, ("ALL",) if select is None else select) for code in RULES}
    return frozenset(code for code in RULES if max(wanted[code], _fit(code, extend)) > _fit(code, ignore))


def _fit(code: str, beginnings: Iterable[str]) -> int:
    """Return how much of a code its best beginning fits; -1 if none does."""
    fits = [0 if each == "ALL" else len(each) for each in beginnings if each == "ALL" or code.startswith(each)]
    return max(fits, default=-1)


class Nearest:
    """The settings for each file, every pyproject.toml read once."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._known: dict[Path, Settings] = {}

    def of(self, file: Path) -> Settings:
        """Return what the nearest pyproject.toml with a [tool.bigbatch.lint] says to a file."""
        # Unlike Path.resolve, this takes a link that leads to itself for what it is.
        return self._of_folder(Path(os.path.realpath(file)).parent)

    def _of_folder(self, folder: Path) -> Settings:
        if folder not in self._known:
            found = read_settings(folder / "pyproject.toml")
            outer = folder.parent
            if found is None:
                found = self._of_folder(outer) if outer != folder else Settings()
            self._known[folder] = found
        return self._known[folder]


def read_settings(path: Path) -> Settings | None:
    """Return what a pyproject.toml says; None if there is none, or nothing in it."""
    if not path.is_file():
        return None
    tool = _read_toml(path).get("tool")
    ours = tool.get("bigbatch") if isinstance(tool, dict) else None
    table = ours.get("lint") if isinstance(ours, dict) else None
    if not isinstance(table, dict):
        return None
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        msg = f"{path}: [tool.bigbatch.lint] knows no {unknown[0]!r}.\nIt knows {', '.join(sorted(_KEYS))}."
        raise SettingsError(msg)
    lists = {key: _list(path, key, table[key]) for key in table}
    settings = Settings(
        lists.get("select"),
        lists.get("extend-select", ()),
        lists.get("ignore", ()),
        lists.get("exclude", ()),
        path.parent,
    )
    try:
        settings.codes()
    except SettingsError as error:
        msg = f"{path}: {error}"
        raise SettingsError(msg) from error
    return settings


def _list(path: Path, key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    msg = f'{path}: {key} in [tool.bigbatch.lint] must be a list of strings; found {value!r}.\nWrite  {key} = ["BB103"]'
    raise SettingsError(msg)


def _read_toml(path: Path) -> dict[str, Any]:
    # Python 3.10 has no TOML reader of its own; there `tomli` is the same one.
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        data: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise SettingsError(msg) from error
    return data

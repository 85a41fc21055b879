"""Which rules and files: `[tool.bigbatch.lint]` in the nearest pyproject.toml, and what the command line says instead.

[tool.bigbatch.lint]
select = ["ALL"]            # codes or their beginnings; instead of the rules that are on by default
ignore = ["BB5"]
exclude = ["legacy", "*_old.py"]
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bigbatch_lint.rules import RULES

_KEYS = ("exclude", "ignore", "select")
# What is installed, made or kept by tools; ruff leaves out the same.
EXCLUDED = tuple(
    ".bzr .direnv .eggs .git .git-rewrite .hg .hypothesis .ipynb_checkpoints .mypy_cache .nox .pants.d .pyenv "
    ".pytest_cache .pytype .ruff_cache .svn .tox .venv .vscode __pycache__ __pypackages__ _build buck-out build dist "
    "node_modules site-packages venv".split()
)


class UsageError(Exception):
    """A command line or settings that cannot be used: what is wrong, and what to write instead."""


@dataclass(frozen=True)
class Settings:
    """What one pyproject.toml says, or the command line."""

    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    folder: Path = Path()  # where it says so

    def codes(self, command: "Settings | None" = None) -> frozenset[str]:
        """Return the codes that are selected and not ignored; of two beginnings that fit, the longer one decides."""
        given = command or Settings(())
        chosen = given.select or self.select, (*self.ignore, *given.ignore)
        select, ignore = (["" if code == "ALL" else code for code in each] for each in chosen)
        for code in {*select, *ignore}:
            if not any(rule.startswith(code) for rule in RULES):
                raise UsageError(f"no rule's code begins with {code!r}\nhint: The rules are {', '.join(RULES)}.")

        def fit(code: str, beginnings: Iterable[str]) -> int:
            return max((len(each) for each in beginnings if code.startswith(each)), default=-1)

        return frozenset(code for code in RULES if fit(code, select) > fit(code, ignore))


def read_settings(path: Path) -> Settings | None:
    """Return what a pyproject.toml says; None if there is none, or nothing in it."""
    if not path.is_file():
        return None
    # Python 3.10 has no TOML reader of its own; there `tomli` is the same one.
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: Any = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for key in ("tool", "bigbatch", "lint"):
        table = table.get(key) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        return None
    for key, value in table.items():
        if key not in _KEYS or not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            hint = f"It knows {', '.join(_KEYS)}, each a list of strings."
            raise UsageError(f"{path}: [tool.bigbatch.lint] cannot use {key} = {value!r}\nhint: {hint}")
    settings = Settings(**{key: tuple(value) for key, value in table.items()}, folder=path.parent)
    try:
        settings.codes()
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    return settings


def settings_of(file: Path, read: Callable[[Path], Settings | None] = read_settings) -> Settings:
    """Return what the nearest pyproject.toml with a [tool.bigbatch.lint] says; `file` has no links."""
    found = (read(folder / "pyproject.toml") for folder in file.parents)
    return next((each for each in found if each is not None), Settings())


def files_in(paths: Iterable[Path], patterns: tuple[str, ...] = EXCLUDED) -> Iterator[Path]:
    """Yield scripts and notebooks in order; a file that was named is read whatever it is called."""
    for path in paths:
        yield from () if path.is_dir() else (path,)
        for root, folders, files in os.walk(path):
            here = Path(root)
            folders[:] = sorted(name for name in folders if not is_excluded(here / name, path, patterns))
            scripts = (here / name for name in sorted(files) if name.endswith((".py", ".ipynb")))
            yield from (file for file in scripts if not is_excluded(file, path, patterns))


def is_excluded(path: Path, base: Path, patterns: tuple[str, ...]) -> bool:
    """Tell whether a pattern fits a file or a folder around it, by name or path below `base`: `build`, `old/*.py`."""
    below = Path(os.path.relpath(path, base))
    names = [text for each in (below, *below.parents) for text in (each.name, each.as_posix())]
    return any(map(_any_of(patterns).match, names))


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(each.rstrip("/")) for each in patterns) or "(?!)")

"""Which files to read: those named, and in folders all scripts and notebooks that no pattern leaves out."""

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

# What is installed, made or kept by tools; ruff leaves out the same.
EXCLUDED = tuple(
    ".bzr .direnv .eggs .git .git-rewrite .hg .hypothesis .ipynb_checkpoints .mypy_cache .nox .pants.d .pyenv "
    ".pytest_cache .pytype .ruff_cache .svn .tox .venv .vscode __pycache__ __pypackages__ _build buck-out build dist "
    "node_modules site-packages venv".split()
)


def files_in(paths: Iterable[Path], patterns: tuple[str, ...] = EXCLUDED) -> Iterator[Path]:
    """Yield each file once, in order; a file that was named is read whatever it is called."""
    seen: set[Path] = set()
    for path in paths:
        for file in _walk(path, patterns) if path.is_dir() else (path,):
            if file not in seen:
                seen.add(file)
                yield file


def _walk(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(name for name in folders if not fits(here / name, folder, patterns))
        for name in sorted(files):
            if name.endswith((".py", ".ipynb")) and not fits(here / name, folder, patterns):
                yield here / name


def fits(path: Path, base: Path, patterns: tuple[str, ...]) -> bool:
    """Tell whether a pattern fits the name, or the path below `base`: `build`, `*_old.py`, `scripts/legacy`."""
    below = path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
    return any(fnmatch(path.name, pattern) or fnmatch(below, pattern.rstrip("/")) for pattern in patterns)


def is_left_out(file: Path, base: Path, patterns: tuple[str, ...]) -> bool:
    """Tell whether a pattern fits a file or a folder it is in."""
    whole = Path(os.path.realpath(file))  # Path.resolve fails on a link that leads to itself
    return any(fits(each, base, patterns) for each in (whole, *whole.parents) if each != base)

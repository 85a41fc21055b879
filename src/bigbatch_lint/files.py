"""Which files to read: those named, and in folders all scripts and notebooks that no pattern leaves out."""

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

ENDINGS = (".py", ".ipynb")
# What is installed, made or kept by tools; ruff leaves out the same.
EXCLUDED = tuple(
    ".bzr .direnv .eggs .git .git-rewrite .hg .hypothesis .ipynb_checkpoints .mypy_cache .nox .pants.d .pyenv "
    ".pytest_cache .pytype .ruff_cache .svn .tox .venv .vscode __pycache__ __pypackages__ _build buck-out build dist "
    "node_modules site-packages venv".split()
)


def files_in(paths: Iterable[Path], excluded: Iterable[str] = EXCLUDED) -> Iterator[Path]:
    """Yield each file once, in order; a file that was named is read whatever it is called."""
    patterns = tuple(excluded)
    seen: set[Path] = set()
    for path in paths:
        found = _walk(path, patterns) if path.is_dir() else iter((path,))
        for file in found:
            if file not in seen:
                seen.add(file)
                yield file


def _walk(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(name for name in folders if not is_excluded(here / name, folder, patterns))
        for name in sorted(files):
            if name.endswith(ENDINGS) and not is_excluded(here / name, folder, patterns):
                yield here / name


def is_excluded(path: Path, base: Path, patterns: Iterable[str]) -> bool:
    """Tell whether a pattern fits the name, or the path below `base`: `build`, `*_old.py`, `scripts/legacy`."""
    try:
        below = path.relative_to(base).as_posix()
    except ValueError:
        below = path.as_posix()
    return any(fnmatch(path.name, pattern) or fnmatch(below, pattern.rstrip("/")) for pattern in patterns)

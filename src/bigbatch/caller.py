"""Where a warning points to."""

import sys


def outside() -> int:
    """Return the stacklevel at which a warning points to the first line outside of this package."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - warnings has it from Python 3.12 on
    while frame.f_back is not None and (frame.f_globals.get("__package__") or "").partition(".")[0] == "bigbatch":
        level, frame = level + 1, frame.f_back
    return level

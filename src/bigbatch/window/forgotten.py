"""A window that nobody closed: what was added to it is lost, and that is said when its accumulator goes."""

import sys
import warnings
import weakref

from bigbatch.window.tally import Ledger


class Forgotten:
    """Knows the window that is open, and warns where its owner goes before it is closed, dropped or saved.

    It holds the counts of the window alone: what is told at the end must not keep a model alive until then.
    """

    def __init__(self, owner: object) -> None:
        """Watch over an owner, also at the end of the program."""
        self.ledger: Ledger | None = None  # of the open window
        self._error = 0  # the id of the last one that was shown when it was opened
        self._known = 0  # how many of its micro-batches the user knows of
        self._made = _line_outside()  # where it goes may be anywhere, also in Python's own end
        weakref.finalize(owner, self._warn)

    def opened(self, ledger: Ledger) -> None:
        """Hear of a new window."""
        self.ledger, self._error = ledger, id(vars(sys).get("last_value"))

    def known(self) -> None:
        """Hear that the user knows of the window as it stands: it was saved, or an error has told of it."""
        self._known = self.ledger.micro_batches if self.ledger is not None else 0

    def closed(self) -> None:
        """Hear that no window is open."""
        self.ledger, self._known = None, 0

    def _warn(self) -> None:
        failed = sys.exc_info()[0] is not None or id(vars(sys).get("last_value")) != self._error
        if self.ledger is None or self.ledger.micro_batches == self._known or failed:  # an exception says enough
            return
        warnings.warn_explicit(
            f"a window was left open with {self.ledger.micro_batches} of {self.ledger.steps} micro-batches, and made "
            "no update. End the last window with accumulator.flush() or wrap the loader, accumulator.over(loader); "
            "accumulator.discard() drops it without a word.",
            UserWarning,
            *self._made,
        )


def _line_outside() -> tuple[str, int]:
    """Return the file and the line that made the owner: the innermost that is not of this package."""
    frame = sys._getframe(1)  # noqa: SLF001 - as `warnings` has it
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "bigbatch":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno

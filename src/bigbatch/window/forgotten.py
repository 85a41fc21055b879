"""Warns of a window that its owner leaves open."""

import sys
import warnings
import weakref

from bigbatch.window.tally import Ledger


class Forgotten:
    """Knows the window that is open, and warns where its owner goes before it is closed, dropped or saved.

    It holds the counts of the window alone: what is told at the end must not keep a model alive until then.
    """

    ledger: Ledger | None = None  # of the open window
    _told: tuple[Ledger | None, int] = None, 0  # what the user knows of

    def __init__(self, owner: object) -> None:
        """Watch over an owner, also at the end of the program."""
        self._error = id(vars(sys).get("last_value"))  # the last one that was shown, in a notebook
        frame = sys._getframe(1)  # noqa: SLF001 - as `warnings` has it
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "bigbatch":
            frame = frame.f_back
        self._made = frame.f_code.co_filename, frame.f_lineno  # where it goes may be in Python's own end
        weakref.finalize(owner, self._warn)

    def told(self) -> None:
        """Note that the user knows of the window as it stands: it was saved, or an error has told of it."""
        if self.ledger is not None:
            self._told = self.ledger, self.ledger.micro_batches

    def _warn(self) -> None:
        ledger, failed = self.ledger, sys.exc_info()[0] is not None or id(vars(sys).get("last_value")) != self._error
        if ledger is not None and (ledger, ledger.micro_batches) not in [self._told, (ledger, 0)] and not failed:
            text = (
                f"a window was left open with {ledger.micro_batches} of {ledger.steps} micro-batches, and made no "
                "update. Use: accumulator.flush(), or accumulator.over(loader); accumulator.discard() drops it."
            )
            warnings.warn_explicit(text, UserWarning, *self._made)

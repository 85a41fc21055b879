"""Calls into a user's file: an exception that comes out of one says which call it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from bigbatch.errors import BigBatchError


class UserCodeError(Exception):
    """A user's own code raised; the cause is its exception, the text says what was being called."""


@contextmanager
def calling(what: str, when: str = "") -> Iterator[None]:
    """Name the call that an exception came out of; the library's own say by themselves what is wrong."""
    try:
        yield
    except BigBatchError:
        raise
    except (Exception, SystemExit) as error:  # a file that calls sys.exit() must not end the command unexplained
        raise UserCodeError(f"{what} failed {when}".rstrip()) from error

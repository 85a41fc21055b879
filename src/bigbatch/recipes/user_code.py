"""Calls into a user's file: which one failed, and the library's refusals in the words of a `Setup`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from bigbatch.errors import BigBatchError, LossError
from bigbatch.wording import in_words_of

# A Setup has a batch_norm of its own, and no Options.
_OF_NORMS = re.compile(r'(BigStep\(\.\.\., options=)?Options\(batch_norm="micro"\)+')
_OF_OPTIONS = re.compile(r"(?<!options=)(Options\(\w+=[^()]+\))")


class UserCodeError(Exception):
    """A user's own code raised; the cause is its exception, the text says what was being called."""


@contextmanager
def calling(what: str, when: str = "") -> Iterator[None]:
    """Name the call that an exception came out of; the library's own already say what is wrong."""
    try:
        yield
    except BigBatchError:
        raise
    except (Exception, SystemExit) as error:  # a file that calls sys.exit() must not end the command unexplained
        raise UserCodeError(f"{what} failed {when}".rstrip()) from error


@contextmanager
def in_a_setups_words() -> Iterator[None]:
    """Let a refusal speak to someone who has written a `Setup`, and neither an `Accumulator` nor a `BigStep`."""
    try:
        yield
    except BigBatchError as error:
        whose = "loss_fn: " if isinstance(error, LossError) else ""
        message = in_words_of("Setup", str(error))
        message = _OF_NORMS.sub('Setup(..., batch_norm="micro")', message)
        message = _OF_OPTIONS.sub(r"BigStep(..., options=\1) in a loop of your own", message)
        raise type(error)(whose + message) from error

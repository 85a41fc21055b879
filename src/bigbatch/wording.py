"""Refusals in the words of whoever reads them: they speak of an `Accumulator`, which not every user has."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from bigbatch.errors import ConfigurationError, LossError

_WITH_COUNT = re.compile(r"accumulator\.backward\((.+?), count=(.+?)\)(?=\s*(#|$))", re.MULTILINE)
_ON_WINDOWS = re.compile(r"^.*accumulator\.(discard|flush)\(\).*\n?", re.MULTILINE)


def in_words_of(entrance: str, message: str) -> str:
    """Say where a thing is typed: count= as counted(...) in loss_fn, options in the `entrance`, windows nowhere."""
    message = _WITH_COUNT.sub(r"return counted(\1, \2)", message)
    message = _ON_WINDOWS.sub("", message)
    message = message.replace("backward takes", "loss_fn must return").replace(", steps=...", "")
    return message.replace("Accumulator(", f"{entrance}(").replace("this accumulator", f"this {entrance}").rstrip()


@contextmanager
def speaking_of(entrance: str) -> Iterator[None]:
    """Let refusals inside speak to someone who has written an `entrance`, and no accumulator."""
    try:
        yield
    except (LossError, ConfigurationError) as error:
        raise type(error)(in_words_of(entrance, str(error))) from error

"""Keep other libraries' advice out of a table."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence(*loggers: str) -> Iterator[None]:
    """Mute what these loggers say below an error, and all warnings; exceptions still raise.

    Enter it after the library is imported: Lightning sets its own levels at import.
    """
    levels = [logging.getLogger(name).level for name in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in loggers:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in zip(loggers, levels, strict=True):
                logging.getLogger(name).setLevel(level)

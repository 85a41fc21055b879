"""What all tests of lock-step stand on."""

import faulthandler
import sys
from collections.abc import Iterator

import pytest

LIMIT = 120  # seconds after which a test hangs


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Micro-batches that wait for each other forever end the run, with the lines they wait at."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__ or sys.stderr)
    yield
    faulthandler.cancel_dump_traceback_later()

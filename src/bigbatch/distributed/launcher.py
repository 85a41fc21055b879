"""What a launcher such as torchrun tells its processes, and what torch says where one of them is gone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from bigbatch.errors import RankFailed

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started() -> int:
    """Return how many processes a launcher says that it has started."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() and all(name in os.environ for name in _TOLD) else 1


def is_of_the_wire(error: BaseException) -> bool:
    """Whether an error is torch's word, or ours, for a rank that is gone; gloo's have no type of their own."""
    ours = isinstance(error, RankFailed | dist.DistError)
    return ours or (isinstance(error, RuntimeError) and "gloo/" in str(error))


_GONE = (
    "another rank has ended, or does not answer, so this window cannot be made. The error is in that rank's own output "
    "(it may have run out of memory, or been killed).\n"
    "Start all ranks again, from a checkpoint."
)


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise a RankFailed where torch loses the connection to another rank."""
    try:
        yield
    except RuntimeError as error:
        if is_of_the_wire(error) and not isinstance(error, RankFailed):
            raise RankFailed(_GONE) from error
        raise

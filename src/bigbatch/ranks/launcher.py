"""What a launcher such as torchrun tells its processes, and what torch says where one of them is gone."""

import os

import torch.distributed as dist

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started() -> int:
    """Return how many processes a launcher says that it has started."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() and all(name in os.environ for name in _TOLD) else 1


def is_of_the_wire(error: BaseException) -> bool:
    """Whether an error is torch's word for a rank that is gone; gloo's have no type of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))

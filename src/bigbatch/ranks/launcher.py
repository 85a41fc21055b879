"""What a launcher such as torchrun tells its processes."""

import os

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started() -> int:
    """Return how many processes a launcher says that it has started."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() and all(name in os.environ for name in _TOLD) else 1

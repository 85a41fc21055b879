"""Memory that matrix products work in: one piece, 32 MiB on a recent GPU, for every thread that ever multiplied."""

from collections.abc import Callable

import torch


def workspaces_given_back() -> Callable[[], None] | None:
    """Return what gives all of it back to torch's own pool, where this torch can.

    What was launched still uses it, on the stream where the next one to get it launches.
    """
    found: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - no public name
    return found

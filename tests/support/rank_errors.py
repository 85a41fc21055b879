"""What an error of a rank says."""

from collections.abc import Callable

from bigbatch.errors import BigBatchError


def heard(work: Callable[..., object], *given: object) -> str:
    """Return what is said where something fails; nothing where it does not."""
    try:
        work(*given)
    except (BigBatchError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

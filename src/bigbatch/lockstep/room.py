"""What the activations of micro-batches take that wait for each other, and whether there is as much."""

from collections.abc import Callable

from bigbatch.errors import OutOfMemory
from bigbatch.memory.budget import human

_SHAPES = 16  # of samples that are measured; of others the largest is taken, and measured where it would not fit


class Waiting:
    """How many bytes of a sample wait, by the shape of samples: a longer one has more."""

    def __init__(self) -> None:
        """Know of none."""
        self._known: dict[str, float] = {}

    def of(self, shape: str, measure: Callable[[], float], fits: Callable[[float], bool]) -> float:
        """Return the bytes of a sample; `measure` runs one micro-batch."""
        if shape not in self._known:
            if len(self._known) >= _SHAPES:
                most = max(self._known.values())
                if fits(most):
                    return most
            self._known[shape] = measure()
        return self._known[shape]


def refuse_too_much(samples: int, needed: int, there: int, *, budgeted: bool) -> None:
    """Raise where the host's memory, or what of it may be used, does not hold what waits."""
    if needed <= there:
        return
    msg = (
        f"the samples of this batch are coupled, so the activations of all {samples}, about {human(needed)}, wait in "
        f"the host's memory while micro-batches run in lock-step, and there are {human(there)} for them"
        f"{' within memory=' if budgeted else ''}. Nothing was changed.\n"
        "Take a smaller batch, activation checkpointing between the norms, or GroupNorm, which needs no lock-step; or "
        'say that it will do:  Options(activations="keep")'
    )
    raise OutOfMemory(msg)

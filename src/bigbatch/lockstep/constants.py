"""Small tensors of numbers that the sizes of a window tell: made on a device once, for whoever asks again.

A captured window reads them where they are, so it holds on to them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bigbatch.execute.graph_record import NotCapturable

_MOST = 512
_made: dict[tuple[object, ...], Tensor] = {}


def constant(key: tuple[object, ...], device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Return a tensor that was made before, or make it; `key` names its numbers."""
    there = (*key, device)
    found = _made.get(there)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # It would be filled by the replays of one graph alone.
        raise NotCapturable("its micro-batches met with other numbers of values than in the window before")
    while len(_made) >= _MOST:
        _made.pop(next(iter(_made)), None)
    _made[there] = found = make()
    return found


def constants() -> list[Tensor]:
    """Return all that there are."""
    return list(_made.values())

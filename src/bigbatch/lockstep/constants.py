"""Small tensors of numbers that the sizes of a window give: made on a device once, and kept for the windows to come.

A captured window reads them where they are, so it holds on to them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bigbatch.execute.graph_record import NotCapturable

_MOST = 512


class Constants:
    """The tensors of one `BigStep`."""

    def __init__(self) -> None:
        """Have none yet."""
        self._made: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: tuple[object, ...], device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that was made before, or make it; `key` names its numbers."""
        place = (*key, device)
        found = self._made.get(place)
        if found is not None:
            return found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # It would be filled by the replays of one graph alone.
            raise NotCapturable("its micro-batches met with other numbers of values than in the window before")
        while len(self._made) >= _MOST:
            self._made.pop(next(iter(self._made)))
        self._made[place] = found = make()
        return found

    def all(self) -> list[Tensor]:
        """Return all that there are."""
        return list(self._made.values())

"""A number on its way from the device to the host, read later without making the device wait."""

import torch
from torch import Tensor


class Arrival:
    """A copy of a 0-d tensor that was started now; `read` waits for this copy alone, not for what was queued since."""

    def __init__(self, number: Tensor) -> None:
        """Start the copy."""
        self._event: torch.cuda.Event | None = None
        if number.device.type == "cuda":
            self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._host.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(number.device))
        else:
            self._host = number

    def read(self) -> float:
        """Return the number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)

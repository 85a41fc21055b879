"""A number on its way from the device to the host, read later without making the device wait."""

import torch
from torch import Tensor


class Arrival:
    """A copy of a 0-d tensor to the host; `read` waits for this copy alone, not for what was queued after it."""

    def __init__(self) -> None:
        """Have nothing under way."""
        self._number: Tensor | None = None
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def start(self, number: Tensor) -> None:
        """Start the copy."""
        self._number = number
        if number.device.type == "cuda":
            if self._host is None or self._event is None or self._host.dtype != number.dtype:
                # kept from window to window: pinning memory is slow
                self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
                self._event = torch.cuda.Event()
            self._host.copy_(number, non_blocking=True)
            self._event.record(torch.cuda.current_stream(number.device))

    def read(self) -> float:
        """Return the number."""
        if self._number is None:
            return 0.0
        if self._number.device.type != "cuda" or self._host is None or self._event is None:
            return float(self._number)
        self._event.synchronize()
        return float(self._host)

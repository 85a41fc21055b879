"""Bring micro-batches to the device, the next one while the current one runs."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bigbatch.batch.split import Division
from bigbatch.batch.tree import mapped

_AHEAD = 8  # micro-batches that are on the device at once, at most: enough to keep it busy while one is launched


class Mover:
    """Moves micro-batches to one device, on a stream of its own where that is a CUDA device.

    The host runs ahead of the device, so when a micro-batch is asked for, the one before is still running, and the copy
    goes on beside it. From the ninth on the host waits until an earlier one has been used, while the device has others.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at: int | None = None  # the number of the micro-batch that is out, while one is
        self._stream: torch.cuda.Stream | None = None
        self._read: torch.cuda.Event | None = None  # the latest copy from memory that is not ours

    def micro_batches(self, division: Division) -> Iterator[Any]:
        """Yield each group's samples where the model is."""
        kept: dict[str, Tensor | None] = dict.fromkeys(division.batch.shared)
        under_way: deque[torch.cuda.Event] = deque()
        for number in range(len(division)):
            micro_batch = division.micro_batch(number)
            self.at = number
            if len(under_way) >= _AHEAD:
                # The host may be many replays ahead, and each has inputs of its own: let some be used first.
                under_way.popleft().synchronize()
            yield self.moved(micro_batch, kept)
            self.at = None
            if self._stream is not None:
                under_way.append(torch.cuda.Event())
                under_way[-1].record(torch.cuda.current_stream(self.device))

    def moved(self, micro_batch: Any, kept: dict[str, Tensor | None] | None = None) -> Any:
        """Return a micro-batch on the device; leaves at the paths in `kept`, which all share, are moved once."""
        shared = kept or {}

        def move(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device == self.device:
                return leaf
            if path not in shared:
                return self._copied(leaf)
            shared[path] = found = shared[path] if shared[path] is not None else self._copied(leaf)
            return found

        found = mapped(micro_batch, move)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return found

    def settle(self) -> None:
        """Wait until memory that is not ours has been read; for these copies alone, not for what computes with them."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None

    def _copied(self, leaf: Tensor) -> Tensor:
        if self.device.type != "cuda" or leaf.device.type != "cpu":
            return leaf.to(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            pinned = leaf.is_pinned()
            there = (leaf if pinned else leaf.pin_memory()).to(self.device, non_blocking=True)
            if pinned:  # the user's own memory, which may be written to as soon as the step returns
                self._read = self._read or torch.cuda.Event()
                self._read.record(self._stream)
        # Made on one stream and used on another: its memory is not given out again before the step has used it.
        there.record_stream(torch.cuda.current_stream(self.device))
        return there

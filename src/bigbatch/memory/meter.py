"""Measure the peak of what an action holds on a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bigbatch.memory.host import resident
from bigbatch.memory.live_bytes import LiveBytes

Result = TypeVar("Result")


class OverLimit(MemoryError):
    """An action was stopped since it would have held more host memory than it may."""


@dataclass(frozen=True)
class Peak:
    """The most bytes that were held at once, with what was there before."""

    allocated: int  # in tensors
    reserved: int  # taken from the device: on CUDA the allocator's cache, too


class Meter:
    """Measures actions on one device, one after the other.

        meter = Meter("cuda")
        loss, peak = meter(lambda: loss_fn(model, batch).backward())

    On CUDA it asks the caching allocator. A CPU has none that keeps a peak: there the meter counts the tensors that
    operations return, on top of what the process held when the meter was made. It slows operations down, so time
    them without it.

    Args:
        device: where the action's tensors are.
        limit: on a CPU, stop with `OverLimit` an action that would hold more. A GPU refuses by itself; a host hands
            out memory that it does not have, and ends the process when that is used.
        beside: on a CPU, bytes to count on top: of tensors that are made, or only meant, after the meter is.
    """

    def __init__(self, device: torch.device | str, limit: int | None = None, beside: int = 0) -> None:
        """Note what the process holds."""
        self.device = torch.device(device)
        self._limit = limit
        # Taken once: memory that one action has freed may stay with the process, and is not the next one's.
        self._before = resident() + beside if self.device.type != "cuda" else 0

    @property
    def before(self) -> int:
        """What is held while nothing runs."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self._before

    def __call__(self, action: Callable[[], Result]) -> tuple[Result, Peak]:
        """Run the action; return what it returns, and its peak."""
        if self.device.type == "cuda":
            return self._on_cuda(action)
        with _Stopping(self._before, self._limit) as live:
            result = action()
        held = self._before + live.peak
        return result, Peak(held, held)

    def _on_cuda(self, action: Callable[[], Result]) -> tuple[Result, Peak]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a larger block that lies around is handed out, and counted, whole
        torch.cuda.reset_peak_memory_stats(self.device)
        result = action()
        torch.cuda.synchronize(self.device)
        peak = Peak(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device))
        return result, peak


class _Stopping(LiveBytes):
    """Counts live bytes, and stops at a limit."""

    def __init__(self, before: int, limit: int | None) -> None:
        super().__init__()
        self._before, self._limit = before, limit

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        if self._limit is not None and self._before + self.now > self._limit:
            raise OverLimit(f"{func} made this {self._before + self.now:,} bytes of at most {self._limit:,}")
        return outputs

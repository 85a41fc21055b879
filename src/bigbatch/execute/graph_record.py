"""Record what a function launches on a device, as a graph that is replayed; all graphs of a recorder share memory."""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

from bigbatch.errors import BigBatchError
from bigbatch.state.oom import is_out_of_memory

Result = TypeVar("Result")


class NotCapturable(BigBatchError):
    """This cannot be captured; the message says why."""

    of_window = False  # whether it was a window in lock-step, not a micro-step


class Recorder:
    """Makes graphs. They may share memory because none runs beside another."""

    def __init__(self, device: torch.device) -> None:
        """Have no memory yet."""
        self._device = device
        self._pool: Any = None

    def forget(self) -> None:
        """Take other memory for the graphs to come: what the ones before have goes with them."""
        self._pool = None

    def record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return the graph of what `run` launches, and what it returns; nothing is computed by this."""
        stream = _capture_stream(self._device)
        _free_workspaces()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.current_stream(self._device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            # Other threads, as a loader's that pins memory, may go on as they like.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = run()
                graph.capture_end()
                _free_workspaces()
            except BaseException as error:
                self._abandon(graph)
                if not isinstance(error, RuntimeError) or isinstance(error, BigBatchError) or is_out_of_memory(error):
                    raise
                said = str(error).splitlines() or [type(error).__name__]
                raise NotCapturable(said[0]) from error
        before.wait_stream(stream)
        return graph, found

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave a capture that failed: torch would go on to hand out the graph's memory, and never free any."""
        with suppress(RuntimeError):
            graph.capture_end()
        _free_workspaces()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001 - no public name
        self._pool = None
        # Torch takes its generator to be in a capture still, until the end of one that succeeds.
        some, graph = torch.empty((), device=self._device), torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                some.zero_()
            finally:
                graph.capture_end()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all captures are made on."""
    return torch.cuda.Stream(device)


def workspaces_freer() -> Callable[[], None] | None:
    """Return what frees the memory that matrix products work in, where this torch can: 32 MiB and more per thread.

    What was launched still uses it, on the stream where the next one to get it launches.
    """
    found: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - no public name
    return found


def _free_workspaces() -> None:
    """Free workspaces around a capture, where they come out of the graph's memory.

    They must not be older, or that memory may be given out again while the graph still writes to it; nor stay, or they
    hold on to it when the graph is long gone.
    """
    free = workspaces_freer()
    if free is not None and torch.cuda.is_available():
        free()

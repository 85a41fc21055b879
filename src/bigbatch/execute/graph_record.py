"""Record what a function launches on a device, as a graph that is replayed; all graphs of a recorder share memory."""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

from bigbatch.errors import BigBatchError
from bigbatch.execute.workspaces import workspaces_given_back
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
        give_workspaces_back()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
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
                give_workspaces_back()
            except BaseException as error:
                self._abandon(graph)
                if not isinstance(error, RuntimeError) or isinstance(error, BigBatchError) or is_out_of_memory(error):
                    raise
                said = str(error).splitlines() or [type(error).__name__]
                raise NotCapturable(said[0]) from error
        before.wait_stream(stream)
        return graph, found

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave a capture that failed: torch would go on to hand out the graph's memory, and never give any back."""
        with suppress(RuntimeError):
            graph.capture_end()
        give_workspaces_back()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001 - no public name
        self._pool = None
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        self._calm_generators()

    def _calm_generators(self) -> None:
        """Let random numbers be drawn again: after a capture that failed torch takes its generator to be in one still.

        The end of a capture that succeeds tells it otherwise.
        """
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


def give_workspaces_back() -> None:
    """Have no memory that matrix products work in, which libraries keep for each thread and stream, for good.

    What is asked for during a capture comes out of the graph's memory. It must not be older, or it may be given out
    again while the graph still writes to it; nor stay, or it holds on to that memory when the graph is long gone.
    """
    give_back = workspaces_given_back()
    if give_back is not None and torch.cuda.is_available():
        give_back()

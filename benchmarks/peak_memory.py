"""The most memory that was allocated at once, asked of the allocator itself."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def peak_bytes(action: Callable[[], Result], device: str) -> tuple[Result, int]:
    """Run `action`; return what it returns and the peak of what was allocated on the device since its start."""
    return _on_cuda(action) if device.startswith("cuda") else _on_cpu(action)


def _on_cuda(action: Callable[[], Result]) -> tuple[Result, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a larger block that lies around is handed out, and counted, whole
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = action()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def _on_cpu(action: Callable[[], Result]) -> tuple[Result, int]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce its start and its end on stderr
    # The CPU allocator keeps no peak, but reports every block it hands out and takes back to the profiler.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        result = action()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        events.export_chrome_trace(str(trace))
        recorded = json.loads(trace.read_text())["traceEvents"]
    blocks = [event["args"] for event in recorded if event["name"] == "[memory]"]
    return result, _highest(sorted(blocks, key=lambda block: int(block["Ev Idx"])))


def _highest(blocks: list[dict[str, int]]) -> int:
    """Add up blocks in the order of their events; one that was there before the start is not ours when it goes."""
    live: dict[int, int] = {}
    now = highest = 0
    for block in blocks:
        address, size = block["Addr"], block["Bytes"]
        if size > 0:
            live[address] = size
            now += size
            highest = max(highest, now)
        else:
            now -= live.pop(address, 0)
    return highest

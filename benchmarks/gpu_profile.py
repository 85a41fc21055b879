"""Where the time of one update goes: the longest kernels, and whether the host or the device is waited for."""

import time

from torch.profiler import ProfilerActivity, profile

from benchmarks.overhead import settle
from benchmarks.racing import Build
from benchmarks.report import Grid

LONGEST = 15
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def profiled(name: str, build: Build, device: str, *, warm_up: int = 3) -> list[Grid]:
    """Build, warm up, and profile one update."""
    contestant = build()
    for number in range(warm_up):
        contestant.update(number)
    settle(device)
    start = time.perf_counter()
    contestant.update(warm_up)
    asked = time.perf_counter() - start
    settle(device)
    wall = time.perf_counter() - start
    on_cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as events:
        contestant.update(warm_up + 1)
        settle(device)
    contestant.close()
    rows = events.key_averages()
    # Ranges that the library or the optimizer names are shown on the device, too, and hold kernels counted already.
    kernels = [
        (row.key, row.self_device_time_total, row.count)
        for row in rows
        if row.device_type.name == "CUDA" and not getattr(row, "is_user_annotation", False)
    ]
    host = [(row.key, row.self_cpu_time_total, row.count) for row in rows if row.device_type.name == "CPU"]
    calls = {key: count for key, _, count in host}
    split: list[tuple[str, ...]] = [
        ("wall clock, without the profiler", f"{wall * 1e3:.1f}"),
        ("of that until the call returned", f"{asked * 1e3:.1f}"),
        ("device busy (kernels and copies, added up)", f"{_total(kernels):.1f}"),
        ("host, under the profiler", f"{_total(host):.1f}"),
        ("launches", str(sum(calls.get(key, 0) for key in LAUNCHES))),
        ("waits of the host (one is the profile's own)", str(sum(calls.get(key, 0) for key in WAITS))),
    ]
    grids = [Grid(f"{name}: one update", ("", "ms or number"), split)]
    if on_cuda:
        grids.append(_longest(f"{name}: longest kernels", kernels))
    return [*grids, _longest(f"{name}: longest on the host", host)]


Row = tuple[str, float, int]


def _total(rows: list[Row]) -> float:
    return sum(microseconds for _, microseconds, _ in rows) / 1e3


def _longest(title: str, rows: list[Row]) -> Grid:
    whole = _total(rows) or 1.0
    longest = sorted(rows, key=lambda row: -row[1])[:LONGEST]
    cells: list[tuple[str, ...]] = [
        (key[:90], f"{microseconds / 1e3:.2f}", f"{microseconds / 10 / whole:.1f} %", str(count))
        for key, microseconds, count in longest
    ]
    return Grid(title, ("", "ms", "share", "calls"), cells)

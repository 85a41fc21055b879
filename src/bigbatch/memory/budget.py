"""How much memory there is to use: of a device, or of the host, as Linux and its control groups tell."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigbatch.errors import ConfigurationError

# "20gib", "20G" and "20Gi" are what people type; a bare letter is taken as nvidia-smi and Docker mean it.
_UNITS = {"b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("i", 1024), ("", 1024), ("b", 1000))
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")
_SMALLEST = 1 << 20  # nobody has a device of less than a MiB: a smaller number was meant in another unit
_UNTOLD = 1 << 33  # a machine that does not say: 8 GiB is what a small one has
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """The memory of a device: what it has, and what this process may reach in all."""

    total: int
    reachable: int


def budget(memory: float | str | None, device: torch.device | str) -> int:
    """Return how many bytes this process may hold on the device, its weights included.

    >>> budget("20GiB", "cuda")
    21474836480

    Args:
        memory: a fraction (0.5), bytes (24e9), text ("20GiB", "20 GB", "80%"), or None: all that this process holds
            already and what is still free.
        device: fractions and None are of this device; for a CPU, of the memory that this process is allowed.
    """
    if memory is None:
        return room(device).reachable
    fraction, asked = read(memory)
    return asked if fraction is None else int(fraction * room(device).total)


def read(memory: object) -> tuple[float | None, int]:
    """Return a fraction of a device's memory, or bytes."""
    size: Any = memory
    if isinstance(memory, str) and (found := _WRITTEN.fullmatch(memory.lower())):
        number, unit = float(found[1]), found[2]
        if unit in _UNITS:
            size = int(number * _UNITS[unit])
        elif unit == "%" or (not unit and "." in found[1]):
            size = number / 100 if unit else number
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    if is_number and isinstance(size, float) and 0 < size <= 1:
        return size, 0
    # "20" and 1.5 are of no unit; "120%" is 1.2, and no number of bytes either
    if not is_number or not _SMALLEST <= size < float("inf"):
        raise ConfigurationError(
            f"memory={memory!r} is neither a fraction of a device nor bytes enough to train in.",
            fix='memory="20GiB", memory="20GB" or memory="80%"; in Python, also bytes (20 * 2**30) or a fraction (0.8)',
        )
    return None, int(size)


def room(device: torch.device | str) -> Room:
    """Look at how much memory a device has and how much of it this process may hold in all."""
    device = torch.device(device)
    if device.type != "cuda":
        limits = [limit for limit, _ in _cgroup_limits()]
        total = min([_machine_total(), *limits])
        return Room(total, min(total, host_available() + resident()))
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"there is no {device}: torch.cuda.is_available() is False.", fix='bigbatch.plan(..., memory="24GiB")'
        )
    free, there = torch.cuda.mem_get_info(device)
    allowed = int(there * torch.cuda.get_per_process_memory_fraction(device))
    # What the caching allocator holds is ours already, whether in use or not.
    return Room(allowed, min(free + torch.cuda.memory_reserved(device), allowed))


def host_available() -> int:
    """Return what this process could still take before the machine or its container runs out."""
    told = _number_in(_MEMINFO, r"MemAvailable:\s+(\d+)")
    free = _machine_total() // 2 if told is None else told * 1024
    return min([free, *(max(0, limit - used) for limit, used in _cgroup_limits())])


def resident() -> int:
    """Return what this process holds; 0 where the system does not say."""
    pages = _number_in(_STATM, r"\d+ (\d+)")
    return pages * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _machine_total() -> int:
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _UNTOLD


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of every group that this process is in and of the groups around it."""
    for line in _text(_OWN_CGROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        root, limit, used, cached = _CGROUPS, "memory.max", "memory.current", "inactive_file"  # version 2
        if "memory" in controllers.split(","):  # version 1
            root, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        elif number != "0":
            continue
        # Inside a container the path is often the host's, which is not there: the group is the root then.
        own = root / path.lstrip("/")
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(root)):
            largest = _number_in(folder / limit, r"(\d+)")  # "max" is none
            if largest is not None:
                # Files read long ago are counted as used and are given up first.
                given_up = _number_in(folder / "memory.stat", rf"(?m)^{cached} (\d+)") or 0
                yield largest, max(0, (_number_in(folder / used, r"(\d+)") or 0) - given_up)


def _number_in(file: Path, pattern: str) -> int | None:
    return int(found[1]) if (found := re.search(pattern, _text(file))) else None


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


def human(size: float) -> str:
    """Write bytes for people: "11.3 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":  # noqa: PLR2004 - the step between units
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:,.3g} {unit}"  # noqa: PLR2004 - three digits

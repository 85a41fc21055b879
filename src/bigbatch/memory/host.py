"""How much of the host's memory this process has and may still have: Linux says so in files, elsewhere little does."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def host_total() -> int:
    """Return the memory of this machine, or of the container this process is in."""
    limits = [limit for limit, _ in _cgroup_limits()]
    return min([_machine_total(), *limits])


def host_available() -> int:
    """Return what this process could still take before the machine or its container runs out."""
    left = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([_meminfo("MemAvailable") or _machine_total() // 2, *left])


def resident() -> int:
    """Return what this process holds."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return _largest_resident()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _largest_resident() -> int:
    """Return the most that this process has held, where what it holds now is not told."""
    try:
        import resource  # noqa: PLC0415 - there is none on Windows
    except ImportError:
        return 0
    largest: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _machine_total() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 33  # a machine that does not say: 8 GiB is what a small one has


def _meminfo(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of every group that this process is in and of the groups around it."""
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:  # version 2
            yield from _limits(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            root = _CGROUPS / "memory"
            yield from _limits(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limits(root: Path, path: str, limit: str, used: str, cached: str) -> Iterator[tuple[int, int]]:
    # Inside a container the path is often the host's, which is not there: the group is the root then.
    own = root / path.lstrip("/")
    for folder in [own, *own.parents]:
        largest = _number(folder / limit)
        if largest is not None:
            # Files read long ago are counted as used and are given up first.
            yield largest, max(0, (_number(folder / used) or 0) - _stat(folder / "memory.stat", cached))
        if folder == root:
            return


def _number(file: Path) -> int | None:
    """Return the number in a file; "max" is none."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _stat(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)

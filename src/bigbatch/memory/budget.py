"""How much memory there is to use, and how much something used at its peak."""

import re
from dataclasses import dataclass

import torch

from bigbatch.errors import ConfigurationError
from bigbatch.memory.host import host_available, host_total, resident

# "20gib", "20G" and "20Gi" are what people type; a bare letter is taken as nvidia-smi and Docker mean it.
_UNITS = {"b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("i", 1024), ("", 1024), ("b", 1000))
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")
_SMALLEST = 1 << 20  # nobody has a device of less than a MiB: a smaller number was meant in another unit
_PERCENT = 100


@dataclass(frozen=True)
class Room:
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
    if isinstance(memory, str):
        return _read_text(memory)
    if isinstance(memory, bool) or not isinstance(memory, int | float):
        raise _refused(memory, f"it is a {type(memory).__name__}")
    if isinstance(memory, float) and 0 < memory <= 1:
        return memory, 0
    if not memory > 0:  # NaN, too
        raise _refused(memory, "memory is a positive number")
    if not _SMALLEST <= memory < float("inf"):
        raise _refused(memory, "an int is bytes, a float up to 1.0 is a fraction")
    return None, int(memory)


def _read_text(text: str) -> tuple[float | None, int]:
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise _refused(text, "it is not a number with a unit")
    number, unit = float(found[1]), found[2]
    if unit == "%" and 0 < number <= _PERCENT:
        return number / _PERCENT, 0
    if not unit:
        raise _refused(text, f"{found[1]} of what? It has no unit")
    if unit.lower() not in _UNITS:
        raise _refused(text, f"{unit!r} is not a unit of memory")
    size = int(number * _UNITS[unit.lower()])
    if size < _SMALLEST:
        raise _refused(text, f"{size:,} bytes are too little to train in")
    return None, size


def _refused(memory: object, why: str) -> ConfigurationError:
    fix = 'memory="20GiB", memory="20GB" or memory="80%"; in Python, also bytes (20 * 2**30) or a fraction (0.8)'
    return ConfigurationError(f"memory={memory!r}: {why}.", fix=fix)


def room(device: torch.device | str) -> Room:
    """Look at how much memory a device has and how much of it this process may hold in all."""
    device = torch.device(device)
    if device.type == "cuda":
        return _cuda_room(device)
    return Room(host_total(), min(host_total(), host_available() + resident()))


def _cuda_room(device: torch.device) -> Room:
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"there is no {device}: torch.cuda.is_available() is False.", fix='bigbatch.plan(..., memory="24GiB")'
        )
    free, total = torch.cuda.mem_get_info(device)
    # What the caching allocator holds is ours already, whether in use or not.
    reachable = free + torch.cuda.memory_reserved(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device)
    return Room(int(total * allowed), min(reachable, int(total * allowed)))


def human(size: float) -> str:
    """Write bytes for people: "11.3 GiB"."""
    size = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":  # noqa: PLR2004 - the step between units
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:,.3g} {unit}"  # noqa: PLR2004 - three digits

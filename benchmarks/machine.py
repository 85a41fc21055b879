"""Where and with what a figure was measured: facts that help to read it, and none that identify a person or a host."""

import os
import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("bigbatch", "torch", "accelerate", "lightning", "transformers")


@dataclass(frozen=True)
class Machine:
    """The machine, its software and the day."""

    date: str
    processor: str
    cores: int
    device: str
    python: str
    versions: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """Plain data for a JSON file."""
        return asdict(self)

    def sentence(self) -> str:
        """One line to put under a table."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        on = self.processor if self.device == self.processor else f"{self.device} ({self.processor} host)"
        return f"Measured on {self.date} on {on}, {self.cores} cores; Python {self.python}, {packages}."


def this_machine(device: str = "cpu") -> Machine:
    """Describe the machine that this process runs on; `device` is where the tensors live."""
    processor = _processor()
    return Machine(
        date=datetime.now(timezone.utc).date().isoformat(),
        processor=processor,
        cores=os.cpu_count() or 1,
        device=torch.cuda.get_device_name() if device.startswith("cuda") else processor,
        python=platform.python_version(),
        versions={name: number for name in PACKAGES if (number := _version(name))},
    )


def _version(package: str) -> str:
    # torch knows its build (+cpu, +cu130) better than its metadata does.
    if package == "torch":
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    # platform.processor() is empty on most Linux systems.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

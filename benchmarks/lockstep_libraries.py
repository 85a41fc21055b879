"""Libraries of models that may be there; one that cannot be imported, for whatever reason, is not."""

from importlib import import_module
from typing import Any


def torchvision_models() -> Any:
    """Return torchvision's models, or None."""
    return imported("torchvision.models")


def imported(name: str) -> Any:
    """Return a module, or None. A torchvision built for another torch fails with all kinds of errors."""
    try:
        return import_module(name)
    except Exception:  # noqa: BLE001
        return None


def versions() -> str:
    """Say which there are."""
    found = [(name, imported(name)) for name in ("torchvision", "timm")]
    there = [f"{name} {getattr(module, '__version__', '?')}" for name, module in found if module is not None]
    return ", ".join(there) or "neither torchvision nor timm"

"""Libraries that the zoo draws on: imported when they are first used, and missing with a reason."""

import functools
import importlib
import importlib.metadata
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built from configurations

# `make zoo` puts timm and torchvision here. Beside a CPU build of torch, PyPI's torchvision cannot load its operators,
# and transformers does not import where it finds such a torchvision.
APART = Path(sys.prefix) / "zoo"
sys.path[:] = [path for path in sys.path if path != str(APART)]  # a process that is spawned inherits it
_NEEDS_TORCHVISION = {"timm", "segmentation_models_pytorch", "torchvision"}
_declared: list[torch.library.Library] = []


class Library:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(load(self._name), name)


@functools.cache
def load(name: str) -> Any:
    """Import a module of a library; an ImportError: it is not installed, or does not load here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say while they load is not about us
        if name.partition(".")[0] in _NEEDS_TORCHVISION:
            _load_torchvision()
        return importlib.import_module(name)


@functools.cache
def missing(library: str) -> str | None:
    """Why a library cannot be had here; None where it can."""
    try:
        load(library)
    except (ImportError, RuntimeError) as error:
        return f"{library} cannot be imported ({str(error).splitlines()[0]}); `make zoo` installs it"
    return None


def version(library: str) -> str:
    """Which version of it is installed."""
    return "missing" if missing(library) else importlib.metadata.version(library.replace("_", "-"))


@functools.cache
def _load_torchvision() -> None:
    """Import torchvision; where its operators do not load, declare those that it registers: its models need none."""
    if APART.is_dir() and str(APART) not in sys.path:
        sys.path.append(str(APART))
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))  # they go when it goes
        for operator in ("nms", "qnms"):
            _declared[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")

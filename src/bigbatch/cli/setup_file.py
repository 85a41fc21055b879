"""Read a user's file: run it and call its `setup()`."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bigbatch.arguments import takes
from bigbatch.distributed.discovery import started
from bigbatch.errors import ConfigurationError
from bigbatch.setup import Setup, calling

MODULE = "bigbatch_setup_file"
_LIKE = "def setup(): ... return Setup(...), as help(bigbatch.Setup) shows"


def refuse_launcher(command: str) -> None:
    """Raise where torchrun has started several processes."""
    if started() > 1:
        raise ConfigurationError(
            f"`bigbatch {command}` runs in one process, and torchrun has started {started()}.",
            fix=f"bigbatch {command} FILE.py, without torchrun. To train on several devices, start from "
            "examples/ranks/ddp.py, or examples/ranks/fsdp2.py for a sharded model.",
        )


def read_setup(path: Path) -> Setup:
    """Return the `Setup` that the file's `setup()` returns.

    A function and not a variable, so that a seed set before the call also seeds the model, and so that a
    file can be imported without building one.
    """
    function = getattr(_run(path), "setup", None)
    if not callable(function) or not takes(function, 0):
        raise ConfigurationError(f"{path} has no function setup() without arguments.", fix=_LIKE)
    with calling("setup()"):
        setup = function()
    if not isinstance(setup, Setup):
        raise ConfigurationError(
            f"setup() in {path} must return a bigbatch.Setup.", found=type(setup).__name__, fix=_LIKE
        )
    return setup


def first_batch(setup: Setup, size: int | None) -> Any:
    """Return the first batch of the data, whole."""
    whole = replace(setup, batch_size=size or setup.batch_size, micro_batch_size=None)
    with calling("making a batch of data"):
        return next(iter(whole.batches()))


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(path.resolve().parent))  # its neighbors can be imported, as under `python FILE.py`
    with calling("reading the file"):
        spec.loader.exec_module(module)
    return module

"""Read a user's file: run it and call its `setup()`."""

import importlib.util
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from bigbatch.cli.terminal import typed
from bigbatch.default_loss import takes
from bigbatch.distributed.discovery import started
from bigbatch.errors import ConfigurationError
from bigbatch.setup import Setup, calling

MODULE = "bigbatch_setup_file"
EXAMPLE = """\
    import torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset
    from bigbatch import Setup

    def setup():
        model = torch.nn.Linear(10, 2)
        inputs = torch.randn(1000, 10)
        labels = torch.randint(2, (1000,))
        return Setup(
            model=model,
            loss_fn=lambda model, batch: F.cross_entropy(
                model(batch[0]), batch[1]
            ),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=TensorDataset(inputs, labels),
            batch_size=64,
            micro_batch_size=16,
        )"""


def refuse_launcher(command: str) -> None:
    """Raise where torchrun has started several processes."""
    if started() > 1:
        raise ConfigurationError(
            f"`bigbatch {command}` runs in one process, and torchrun has started {started()}.",
            fix=f"bigbatch {command} FILE.py, without torchrun. To train on several devices, start from "
            "examples/ranks/ddp.py, or examples/ranks/fsdp2.py for a sharded model.",
        )


def read_setup(path: Path, command: str) -> Setup:
    """Return the `Setup` that the file's `setup()` returns; `command` is what the hints say to type.

    A function and not a variable, so that a seed set before the call also seeds the model, and so that a
    file can be imported without building one.
    """
    _require_file(path, command)
    function = getattr(_run(path), "setup", None)
    if not callable(function) or not takes(function, 0):
        raise ConfigurationError(
            f"{path} has no function setup() without arguments.", fix=f"as in this file:\n{EXAMPLE}"
        )
    with calling("setup()"):
        setup = function()
    if not isinstance(setup, Setup):
        raise ConfigurationError(
            f"setup() in {path} must return a bigbatch.Setup.",
            found=type(setup).__name__,
            fix=f"as in this file:\n{EXAMPLE}",
        )
    return setup


def first_batch(setup: Setup, size: int | None) -> tuple[Any, int]:
    """Return the first batch of the data, whole, and how many samples it was to have."""
    whole = replace(setup, batch_size=size or setup.batch_size, micro_batch_size=None)
    with calling("making a batch of data"):
        return next(iter(whole.batches())), whole.batch_size


def with_short_data(notes: tuple[str, ...], found: int, asked: int) -> tuple[str, ...]:
    """Put a note before others where the data has fewer samples than a batch was to have."""
    note = f"The file's data has {found:,} samples in all: no batch of {asked:,} can be made."
    return (note, *notes) if found < asked else notes


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


def suggest(names: Iterable[str], asked: str, command: str) -> str:
    """Return the nearest names as commands to type; empty where none is near."""
    lower = {Path(name).name.lower(): name for name in names}
    near = get_close_matches(Path(asked).name.lower(), lower, n=3)
    return "  or  ".join(typed(f"{command} {shlex.quote(lower[name])}") for name in near)


def _require_file(path: Path, command: str) -> None:
    """Raise for a folder and for what is not there, naming what is."""
    if not path.is_file():
        recipes = "bigbatch train, or bigbatch train adamw, which need no file" if command == "train" else ""
        near = suggest(map(str, path.parent.glob("*.py")), path.name, command)
        what = f"{path} is a folder, not a file with setup()." if path.is_dir() else f"There is no file {path}."
        raise ConfigurationError(what, fix=near or recipes)

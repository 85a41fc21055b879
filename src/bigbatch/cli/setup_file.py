"""Read a user's file: run it and call its `setup()`."""

import importlib.util
import shlex
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from bigbatch.cli.terminal import typed
from bigbatch.default_loss import takes
from bigbatch.distributed.discovery import started
from bigbatch.errors import ConfigurationError
from bigbatch.recipes.user_code import calling
from bigbatch.setup import Setup

_MODULE = "bigbatch_setup_file"
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


def read_setup(path: Path, command: str = "train") -> Setup:
    """Return the `Setup` that the file's `setup()` returns; `command` is what the hints say to type.

    A function and not a variable, so that a seed set before the call also seeds the model, and so that a
    file can be imported without building one.
    """
    _require_file(path, command)
    module = _run(path)
    function = getattr(module, "setup", None)
    if isinstance(function, Setup):
        raise ConfigurationError(
            f"In {path}, setup is a Setup, made before the seed could be set.", fix="def setup(): return Setup(...)"
        )
    if not callable(function):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == _MODULE]
        near = get_close_matches("setup", own, n=1)
        fix = f"def setup(): ... instead of {near[0]}" if near else f"as in this file:\n{EXAMPLE}"
        raise ConfigurationError(f"{path} has no function setup().", fix=fix)
    if not takes(function, 0):
        raise ConfigurationError(
            f"setup() in {path} is called without arguments, and needs some.", fix="def setup(): ..."
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


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(path.resolve().parent))  # its neighbors can be imported, as under `python FILE.py`
    with calling("reading the file"):
        spec.loader.exec_module(module)
    return module


def suggest(names: Iterable[str], asked: str, directory: Path = Path(), command: str = "train") -> str:
    """Return the nearest names as commands to type; empty where none is near."""
    lower = {name.lower(): name for name in names}
    near = get_close_matches(asked.lower(), lower, n=3)
    return "  or  ".join(_typed(command, directory / lower[name]) for name in near)


def _typed(command: str, path: Path) -> str:
    return typed(f"{command} {shlex.quote(str(path))}")


def _require_file(path: Path, command: str) -> None:
    """Raise for a folder and for what is not there, naming what is."""
    if path.is_dir():
        inside = next(iter(sorted(path.glob("*.py"))), path / "FILE.py")
        raise ConfigurationError(f"{path} is a folder, not a file with setup().", fix=_typed(command, inside))
    recipes = "bigbatch train, or bigbatch train adamw, which need no file" if command == "train" else ""
    if not path.parent.is_dir():
        raise ConfigurationError(f"There is no folder {path.parent}, so no {path.name} in it.", fix=recipes)
    if not path.is_file():
        near = suggest([each.name for each in path.parent.glob("*.py")], path.name, path.parent, command)
        raise ConfigurationError(f"There is no file {path}.", fix=near or recipes)

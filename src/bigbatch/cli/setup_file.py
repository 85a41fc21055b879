"""Read a user's file: run it and call its `setup()`."""

import importlib.util
import shlex
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from bigbatch.cli.terminal import typed
from bigbatch.errors import ConfigurationError
from bigbatch.recipes.user_code import calling
from bigbatch.setup import Setup
from bigbatch.setup_checks import takes

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

WITHOUT_A_FILE = (
    "Without a file there are the teaching pages' examples: `bigbatch train` runs the textbook's experiment, "
    "`bigbatch train adamw` the second."
)


def read_setup(path: Path, command: str = "train") -> Setup:
    """The `Setup` that the file's `setup()` returns; `command` is what the hints say to type.

    A function and not a variable, so that a seed set before the call also seeds the model, and so that a
    file can be imported without building one.
    """
    _require_file(path, command)
    module_name = "bigbatch_setup_file"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file.\nIts name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as under `python FILE.py`
    with calling("reading the file"):
        spec.loader.exec_module(module)
    function = getattr(module, "setup", None)
    if isinstance(function, Setup):
        raise ConfigurationError(
            f"in {path}, setup is a Setup, not a function, so the seed could not be set before it was made.\n"
            "Put it into a function:  def setup(): return Setup(...)"
        )
    if not callable(function):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        near = get_close_matches("setup", own, n=1)
        advice = f"Rename {near[0]}:  def setup(): ..." if near else f"Write one, as in this file:\n{EXAMPLE}"
        raise ConfigurationError(f"{path} has no function setup().\n{advice}")
    if not takes(function, 0):
        raise ConfigurationError(
            f"setup() in {path} needs arguments, and is called without any.\n"
            "Give each of them a default, or set it inside:  def setup(): ..."
        )
    with calling("setup()"):
        setup = function()
    if not isinstance(setup, Setup):
        raise ConfigurationError(
            f"setup() in {path} returned {type(setup).__name__}, not a bigbatch.Setup.\n"
            f"Return what is to be trained, as this file does:\n{EXAMPLE}"
        )
    return setup


def suggested(names: Iterable[str], asked: str, directory: Path = Path(), command: str = "train") -> str:
    """The nearest names as commands to type, each on a line; empty where none is near."""
    lower = {name.lower(): name for name in names}
    near = [directory / lower[name] for name in get_close_matches(asked.lower(), lower, n=3)]
    return "Did you mean\n" + "".join(f"    {_typed(command, path)}\n" for path in near) if near else ""


def _typed(command: str, path: Path) -> str:
    return typed(f"{command} {shlex.quote(str(path))}")


def _require_file(path: Path, command: str) -> None:
    """Refuse a directory and what is not there, naming what is."""
    if path.is_dir():
        inside = next(iter(sorted(path.glob("*.py"))), path / "FILE.py")
        raise ConfigurationError(
            f"{path} is a directory, not a file.\n"
            f"Name the file in it that has setup(), such as\n    {_typed(command, inside)}"
        )
    otherwise = WITHOUT_A_FILE if command == "train" else ""
    if not path.parent.is_dir():
        raise ConfigurationError(f"there is no directory {path.parent}, so no {path.name} in it.\n{otherwise}")
    if not path.is_file():
        near = suggested([each.name for each in path.parent.glob("*.py")], path.name, path.parent, command)
        raise ConfigurationError(f"there is no file {path}.\n{near}{otherwise}")

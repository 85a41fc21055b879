"""Read a user's file: run it and call its `setup()`."""

import importlib.util
import sys
from pathlib import Path

from bigbatch.errors import ConfigurationError
from bigbatch.setup import Setup

EXAMPLE = """\
write one that returns what is to be trained:
    def setup():
        model = ...
        return bigbatch.Setup(model=model, optimizer=..., data=..., loss_fn=..., batch_size=64)"""


def read_setup(path: Path) -> Setup:
    """The `Setup` that the file's `setup()` returns.

    A function and not a variable, so that a seed set before the call also seeds the model, and so that a
    file can be imported without building one.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    module_name = "bigbatch_setup_file"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file\n\nits name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as under `python FILE.py`
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigurationError(f"{path}, line {error.lineno}: {error.msg}") from error
    function = getattr(module, "setup", None)
    if isinstance(function, Setup):
        raise ConfigurationError(
            f"in {path}, setup is a Setup, not a function, so the seed could not be set before it was made\n\n"
            "put it into a function: def setup(): return Setup(...)"
        )
    if not callable(function):
        raise ConfigurationError(f"{path} has no function setup()\n\n{EXAMPLE}")
    setup = function()
    if not isinstance(setup, Setup):
        raise ConfigurationError(
            f"setup() in {path} returned {type(setup).__name__}, not a bigbatch.Setup\n\n{EXAMPLE}"
        )
    return setup

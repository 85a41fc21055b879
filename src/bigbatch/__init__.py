"""Train with the batch size you want in the memory you have, with exactly the gradients that the big batch would give.

A loop over micro-batches takes three lines:

    accumulator = Accumulator(model, optimizer, steps=4)
    for inputs, labels in accumulator.over(loader):
        accumulator.backward(criterion(model(inputs), labels))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigbatch import across, errors
    from bigbatch.accumulator import Accumulator
    from bigbatch.big_step import BigStep
    from bigbatch.learning_rate import scale_lr, warmup
    from bigbatch.loss.count import counted
    from bigbatch.noise.monitor import GradientNoise
    from bigbatch.options import Options
    from bigbatch.planner.measure import plan
    from bigbatch.setup import Setup
    from bigbatch.update import Update
    from bigbatch.verification.api import verify
    from bigbatch.verification.result import Verification as Verification

__all__ = [
    "Accumulator",
    "BigStep",
    "GradientNoise",
    "Options",
    "Setup",
    "Update",
    "across",
    "counted",
    "errors",
    "plan",
    "scale_lr",
    "verify",
    "warmup",
]

# Where each name lives. They are imported when first asked for: the command line's help must not wait for torch.
_HOMES = {
    "Accumulator": "accumulator",
    "BigStep": "big_step",
    "GradientNoise": "noise.monitor",
    "Options": "options",
    "Setup": "setup",
    "Update": "update",
    "Verification": "verification.result",  # what verify returns: for annotations
    "counted": "loss.count",
    "plan": "planner.measure",
    "scale_lr": "learning_rate",
    "verify": "verification.api",
    "warmup": "learning_rate",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module it lives in."""
    if name in {"across", "errors"}:
        return import_module(f"bigbatch.{name}")
    if name not in _HOMES:
        msg = f"module 'bigbatch' has no attribute {name!r}"
        raise AttributeError(msg)
    found: object = getattr(import_module(f"bigbatch.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names."""
    return __all__

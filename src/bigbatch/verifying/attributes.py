"""The numbers and tensors that modules keep as plain attributes, beside their buffers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

Written = dict[nn.Module, dict[str, Any]]


def attributes(model: nn.Module) -> Written:
    """Return copies of them, of each module."""
    return {module: copied(of_module(module)) for module in model.modules()}


def of_module(module: nn.Module) -> dict[str, Any]:
    """Return those of one module."""
    kinds = (int, float, Tensor)
    return {
        k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "training" and not k.startswith("__")
    }


def put_back(written: Written) -> None:
    """Put them back as they were; what is new is gone."""
    for module, kept in written.items():
        for name in of_module(module).keys() - kept.keys():
            del vars(module)[name]
        vars(module).update(copied(kept))


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what can be written to."""
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values.items()}

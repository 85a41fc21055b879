"""Take the random numbers out of a forward, and leave in as much as can be of what it does in training."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase as Statistics
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.overrides import TorchFunctionMode

# Dropout by its other names: DropPath, StochasticDepth, DropBlock, as many libraries write for themselves.
_NAMED_SO = re.compile(r"drop|stochasticdepth", re.IGNORECASE)
_DROPOUTS = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
_DROPOUTS |= {name + "_" for name in _DROPOUTS} | {"dropout1d", "dropout2d", "dropout3d"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# Which argument of which function makes it random, by name and by place, and what does not.
_CALMING: Mapping[str, tuple[str, int, float]] = {
    "native_dropout": ("train", 2, False),
    "scaled_dot_product_attention": ("dropout_p", 4, 0.0),
    "multi_head_attention_forward": ("dropout_p", 10, 0.0),
    "rrelu": ("training", 3, False),
    "rrelu_": ("training", 3, False),
}


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Be in evaluation mode: what training alone does is hidden."""
    with _resting(models, lambda _: True):
        yield


@contextmanager
def without_dropout(models: Sequence[nn.Module]) -> Iterator[None]:
    """Turn dropout off, that of functions, too, and stay in training mode for the rest."""
    with _resting(models, _is_dropout), _DropoutOff():
        yield


@contextmanager
def without_statistics(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have BatchNorm use what it has learned, and stay in training mode for the rest."""
    with _resting(models, lambda module: isinstance(module, Statistics)):
        yield


@contextmanager
def _resting(models: Sequence[nn.Module], choose: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Put some modules in evaluation mode, each by itself."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    before = [(module, module.training) for module in modules if choose(module)]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _is_dropout(module: nn.Module) -> bool:
    """Whether a module is some kind of dropout. One that has weights or parts does other things, too."""
    if isinstance(module, Dropout):
        return True
    bare = next(module.children(), None) is None and next(module.parameters(), None) is None
    return bare and _NAMED_SO.search(type(module).__name__) is not None


class _DropoutOff(TorchFunctionMode):
    """Inside, functions drop nothing, whoever calls them and under whatever name they were imported."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what was called, or less of it."""
        del types
        name, _, _ = str(getattr(func, "__name__", "")).partition(".")  # torch.ops.aten.dropout.default
        kwargs = dict(kwargs or {})
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name in _RECURRENT:  # packed or not: the one fraction among the arguments is the dropout between layers
            args = tuple(0.0 if isinstance(each, float) else each for each in args)
        elif name in _CALMING:
            keyword, place, calm = _CALMING[name]
            if len(args) > place:
                args = (*args[:place], calm, *args[place + 1 :])
            else:
                kwargs[keyword] = calm
        return func(*args, **kwargs)

"""What models hold beside tensors, and a captured window has found once for all: numbers, layers, functions, hooks."""

from collections.abc import Iterator, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from bigbatch.batch.tree import PLAIN
from bigbatch.lockstep.holdings import Holder, Picture, entries

_FEW = 4096  # bytes of an array
# Layers and functions are compared by identity, so they are held.
_TOLD = (*PLAIN, complex, torch.dtype, torch.device, Enum, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


class Surroundings:
    """What some models hold, as it was when one last looked."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Look."""
        self._models = models
        self._look()

    @property
    def generators(self) -> list[Any]:
        """The models' own generators of random numbers."""
        return [each for picture in self._pictures for each in picture.generators]

    def stay(self) -> bool:
        """Whether all of it is as it was; if not, it is from now on."""
        if all(picture.renewed() is picture for picture in self._pictures) and self._hooks == self._hooks_now():
            return True
        before = self._seen, self._hooks
        self._look()
        return before == (self._seen, self._hooks)

    def _look(self) -> None:
        self._pictures = [Picture(model) for model in self._models]
        self._seen = [each for picture in self._pictures for each in _told(picture)]
        self._hooks = self._hooks_now()

    def _hooks_now(self) -> list[Any]:
        """Return the keys of hooks on parameters: each is given out once."""
        found = []
        for model in self._models:
            for p in model.parameters():
                for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    hooks = getattr(p, name, None)
                    if hooks:
                        found.append((name, *hooks))
        return found


def _told(picture: Picture) -> Iterator[Any]:
    contents: list[Holder] = [*picture.contents, *(stranger.content for stranger in picture.strangers)]
    for content in contents:
        for key, value in entries(content):
            yield key, value if _is_told(value) else _content(value)


def _is_told(value: Any) -> bool:
    """Whether two of a kind that look alike are alike."""
    if isinstance(value, tuple):
        return all(map(_is_told, value))
    return value is None or isinstance(value, _TOLD)


def _content(value: Any) -> Any:
    """Return what can be compared of anything else: numpy's numbers, and of others the type. Tensors have a place."""
    numbers = getattr(value, "tobytes", None)
    return numbers() if numbers is not None and getattr(value, "nbytes", _FEW + 1) <= _FEW else type(value)
